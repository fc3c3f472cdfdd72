# SPDX-License-Identifier: Apache-2.0
"""Floor 7. `python -m jaxmoe`."""

from jaxmoe import cli

cli.command()
