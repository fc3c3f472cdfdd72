# SPDX-License-Identifier: Apache-2.0
"""Floor 7. The command line: `jaxmoe COMMAND`, `python -m jaxmoe COMMAND`, train.py.

Nothing of JAX is imported before the command is known and its configuration is right.

Exit codes: 0 done; 1 a failure at run time; 2 the user's mistake, told in one message;
75 stopped by a signal after saving.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from jaxmoe import (
    __version__,
    aot_command,
    cluster,
    config_checks,
    doctor_command,
    generate_command,
    gin_config,
    inspect_command,
    overlap_command,
    plan_command,
    schedule_command,
)
from jaxmoe.config import Config, ConfigError
from jaxmoe.roll_call import StartError

EXIT_FAILED, EXIT_MISTAKE, EXIT_STOPPED = 1, 2, 75

_USAGE = """\
usage: jaxmoe COMMAND [--gin_file=FILE] [--gin.X.y=VALUE] [options]

  train     train a model: [--workdir=DIR]; a run found in DIR goes on
  eval      evaluate a finished run: --workdir=DIR [--json]
  generate  caption images, continue or complete texts: --workdir=DIR
            [--image=FILE]... [--prompt=TEXT]... [--language=en|zh]
            [--beam=N | --temperature=T --top_p=P --seed=N] [--max_tokens=N] [--json]
  schedule  simulate a pipeline schedule: NAME --ranks=R --microbatches=M
            [--costs=F=1,Bi=1,W=1,FB=3] [--figure=FILE] [--csv=FILE] [--json]
  aot       compile the train step for a machine that is not there:
            --topology=v5p:4x4x4 [--search] [--figure=FILE.html] [--json]
  plan      place copies of experts: LOADS --replicas=P --groups=G --nodes=N
            --devices=D [--policy=reference|swap|incremental] [--previous=PLAN]
            [--figure=FILE] [--json]
  overlap   tell how much communication of a profile is hidden: TRACE
            [--pattern=CLASS=REGEX]... [--section=REGEX] [--figure=FILE] [--json]
  inspect   list the checkpoints of a run, without devices: DIR [--step=N]
            [--export=FILE.safetensors] [--json]
  doctor    versions, devices, flags and disk, and what is wrong with them:
            [--workdir=DIR] [--timeout=SECONDS] [--json]

Every option of the configuration is set with --gin.SECTION.FIELD=VALUE, for example
--gin.MoE.num_experts=16 or --gin.Train.steps=200; --gin_file=FILE may be repeated.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "eval": _eval,
        "generate": _generate,
        "schedule": partial(_alone, "schedule", schedule_command),
        "plan": partial(_alone, "plan", plan_command),
        "aot": _aot,
        "overlap": partial(_alone, "overlap", overlap_command),
        "inspect": partial(_alone, "inspect", inspect_command),
        "doctor": partial(_alone, "doctor", doctor_command),
    }
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0
    if arguments[0] == "--version":
        print(f"jaxmoe {__version__}")
        return 0
    try:
        if arguments[0] not in commands:
            raise ConfigError(
                f"there is no command {arguments[0]!r}. The commands are"
                f" {', '.join(commands)}. Try `jaxmoe train`."
            )
        return commands[arguments[0]](arguments[1:])
    except ConfigError as mistake:
        return _failed(mistake, EXIT_MISTAKE)
    except StartError as failure:
        return _failed(failure, EXIT_FAILED)
    except KeyboardInterrupt:
        return _failed("interrupted", EXIT_STOPPED)
    except Exception:  # a fault of the program, not to be waited for by others
        _leave(EXIT_FAILED, traceback.format_exc())
        raise


def command(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and ends the process with its exit code, also if a signal came
    while something was being compiled: the compiler cannot be interrupted, and Python
    would wait for it.
    """
    code = main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    trainer = sys.modules.get("jaxmoe.trainer")  # not there: nothing was compiled
    if trainer and trainer.is_compiling():
        os._exit(code)
    sys.exit(code)


def _failed(why: object, code: int) -> int:
    """Tells why, and gives the exit code."""
    text = f"jaxmoe: {why}\n"
    _leave(code, text)
    sys.stderr.write(text)
    return code


def _leave(code: int, text: str) -> None:
    """If there are several processes, ends this one with a last word."""
    if "jaxmoe.trainer" in sys.modules:  # else nothing was started
        from jaxmoe import processes

        if processes.joined():
            sys.stderr.write(text)
            processes.leave(code)


def _train(arguments: list[str]) -> int:
    files, bindings, rest = gin_config.split_arguments(arguments)
    if "-h" in rest or "--help" in rest:
        print(_USAGE, end="")
        return 0
    options = _parser("train").parse_args(rest)
    loaded = gin_config.load(files, bindings)
    config_checks.check(loaded.config)
    everywhere = cluster.without_place(loaded.config)
    config_text = gin_config.to_gin(everywhere, loaded.provenance)
    place = cluster.find(loaded.config.mesh)
    if place and not options.workdir:
        raise ConfigError(
            f"{place.num_processes} processes ({place.source}) have no --workdir. All"
            " write to one run folder, and a new name would be another in each. Name"
            " a folder that all of them have mounted."
        )
    workdir = Path(options.workdir or _new_workdir(files)).absolute()
    if workdir.is_file():
        raise ConfigError(
            f"--workdir={options.workdir} is a file. It must be a folder, or not exist"
            " yet. Name another."
        )

    with _first_alone_prints(place):
        return _run(loaded.config, workdir, config_text)


def _run(config: Config, workdir: Path, config_text: str) -> int:
    # Imported here: a mistake in the configuration costs no start of JAX.
    from jaxmoe import processes
    from jaxmoe.checkpoint import CheckpointError
    from jaxmoe.data.fields import DataError
    from jaxmoe.step_log import RunError
    from jaxmoe.trainer import Stopped, Trainer

    print(config_text)
    trainer = Trainer(config, workdir, config_text)
    print(
        f"{trainer.platform}: mesh {trainer.sizes} ({trainer.sizes.reason})\n"
        f"run folder: {workdir}",
        flush=True,
    )
    try:
        summary = trainer.run()
    except Stopped as stopped:
        print(f"jaxmoe: {stopped}", file=sys.stderr)
        return EXIT_STOPPED
    except (
        RunError,
        CheckpointError,
        DataError,
        processes.LostError,
        OSError,  # the run folder is full, gone or read-only
    ) as failure:
        return _failed(failure, EXIT_FAILED)
    for name, value in summary.items():
        print(
            f"{name:28} {value:.4g}"
            if isinstance(value, float)
            else f"{name:28} {value}"
        )
    return 0


@contextlib.contextmanager
def _first_alone_prints(place: cluster.Place | None) -> Iterator[None]:
    """Where there are several processes, the first one speaks for all."""
    if place is None or place.process_id == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def _eval(arguments: list[str]) -> int:
    """Evaluates the newest checkpoint of a run folder, with the run's configuration."""
    parser = _parser("eval")
    parser.add_argument("--json", action="store_true")
    options, loaded = _of_run(parser, arguments)
    config_checks.check(loaded.config)

    from jaxmoe.trainer import evaluate_run

    with _first_alone_prints(cluster.find(loaded.config.mesh)):
        figures = evaluate_run(loaded.config, Path(options.workdir).absolute())
        for name, value in figures.items():
            print(f"{name:28} {value:.4g}")
        if options.json:
            print(json.dumps(figures))
    return 0


def _generate(arguments: list[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        print(_USAGE, end="")
        return 0
    parser = _parser("generate")
    generate_command.add_arguments(parser)
    options, loaded = _of_run(parser, arguments)
    return generate_command.run(options, loaded)


def _of_run(
    parser: argparse.ArgumentParser, arguments: list[str]
) -> tuple[argparse.Namespace, gin_config.Loaded]:
    """The options of a command about a run, and the run's configuration with what the
    command line changes."""
    files, bindings, rest = gin_config.split_arguments(arguments)
    options = parser.parse_args(rest)
    saved = Path(options.workdir or ".") / "config.gin"
    if not options.workdir or not saved.is_file():
        raise ConfigError(
            f"--workdir={options.workdir} is not a run folder: it has no config.gin."
            f" `{parser.prog}` is about a run. Name the folder that train wrote."
        )
    return options, gin_config.load([str(saved), *files], bindings)


def _aot(arguments: list[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        print(_USAGE, end="")
        return 0
    files, bindings, rest = gin_config.split_arguments(arguments)
    parser = _Parser(prog="jaxmoe aot", add_help=False, allow_abbrev=False)
    aot_command.add_arguments(parser)
    options = parser.parse_args(rest)
    loaded = gin_config.load(files, bindings)
    config_checks.check(loaded.config)
    return aot_command.run(options, loaded.config)


def _alone(name: str, command: ModuleType, arguments: list[str]) -> int:
    """A command of a module of its own, which needs no configuration."""
    if "-h" in arguments or "--help" in arguments:
        print(_USAGE, end="")
        return 0
    parser = _Parser(prog=f"jaxmoe {name}", add_help=False, allow_abbrev=False)
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def _new_workdir(files: Sequence[str]) -> str:
    name = Path(files[-1]).stem if files else "m6_digits"
    return f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"


class _Parser(argparse.ArgumentParser):
    """Tells a mistake as everything else here does."""

    def error(self, message: str):
        raise ConfigError(f"{self.prog}: {message}. `jaxmoe --help` lists the options.")


def _parser(command: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=f"jaxmoe {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--workdir", default="")
    return parser


if __name__ == "__main__":
    sys.exit(main())
