# SPDX-License-Identifier: Apache-2.0
"""Floor 7. `python -m jaxmoe`."""

import sys

from jaxmoe import cli

sys.exit(cli.main())
