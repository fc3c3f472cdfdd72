# SPDX-License-Identifier: Apache-2.0
"""The house: which module may import which. The table is the one in docs/design.md."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

FLOORS = (
    (
        *("xla_options", "config", "config_base", "config_checks", "config_derived"),
        "config_values",
        "config_changes",
        *("config_source", "gin_config", "pipeline.schedule", "pipeline.schedule_file"),
        *("pipeline.simulate", "pipeline.search", "pipeline.lower", "pipeline.draw"),
        *("pipeline.partition", "pipeline.works", "eplb.sizes"),
        *("aot.chips", "aot.gpu_target"),
        *("aot.program", "aot.network", "aot.collectives", "aot.timing"),
        *("cluster", "roll_call", "versions", "watchdog"),
    ),
    ("mesh", "sharding", "tree_names", "processes", "stop"),
    ("layers.*", "moe.*"),
    ("model", "loss", "parts", "decode"),
    ("pipeline.*", "eplb.*"),
    (
        *("data.*", "optim", "checkpoint*", "metrics*", "plots"),
        *("trace_file", "trace_kernels", "overlap"),
    ),
    (
        "train_step",
        "nonfinite",
        "rebalance",
        "step_log",
        "trainer",
        "profile",
        "warm_start",
        "evaluate",
        "generate",
        "export",
    ),
    (
        *("cli", "schedule_command", "plan_command", "overlap_command", "__main__"),
        *("aot_command", "aot.*", "inspect_command", "generate_command", "doctor*"),
    ),
)
WITHOUT_JAX = ("jax", "flax", "optax", "orbax", "grain")


def modules() -> dict[str, Path]:
    """Every module of the package by its name without 'jaxmoe.'."""
    package = ROOT / "jaxmoe"
    return {
        ".".join(path.relative_to(package).with_suffix("").parts): path
        for path in sorted(package.rglob("*.py"))
        if path.name != "__init__.py"
    }


def floor(module: str) -> int:
    """The floor on which a module stands."""
    for number, patterns in enumerate(FLOORS):
        for pattern in patterns:
            if re.fullmatch(pattern.replace(".", r"\.").replace("*", ".*"), module):
                return number
    raise AssertionError(f"{module} stands on no floor: add it to FLOORS")


def imports(path: Path, package: str) -> set[str]:
    """Full names of what a file imports anywhere, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    return {name for name in names if name.split(".")[0] == package or not package}


def edges() -> dict[str, set[str]]:
    """Imports between the package's own modules."""
    known = modules()
    return {
        name: {i.removeprefix("jaxmoe.") for i in imports(path, "jaxmoe")} & set(known)
        for name, path in known.items()
    }


def test_no_module_imports_from_a_higher_floor():
    wrong = [
        f"{name} (floor {floor(name)}) imports {other} (floor {floor(other)})"
        for name, others in edges().items()
        for other in others
        if floor(other) > floor(name)
    ]
    assert not wrong, wrong


def test_imports_have_no_cycle():
    graph, done = edges(), set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"cycle: {' -> '.join((*trail, name))}"
        if name not in done:
            for other in graph[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_floor_0_does_without_jax():
    for name, path in modules().items():
        if floor(name) == 0:
            found = {i.split(".")[0] for i in imports(path, "")} & set(WITHOUT_JAX)
            assert not found, f"{name} imports {found}"


def test_init_files_are_empty_but_for_the_version():
    for path in (ROOT / "jaxmoe").rglob("__init__.py"):
        lines = [line for line in path.read_text().splitlines() if line[:1] not in "#"]
        assert all(line.startswith("__version__") for line in lines), path


def test_files_and_functions_are_short():
    """No file over 500 lines, no function over 80."""
    for path in sorted((ROOT / "jaxmoe").rglob("*.py")):
        text = path.read_text("utf-8")
        assert len(text.splitlines()) <= 500, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= 80, f"{path}:{node.lineno} {node.name}: {length} lines"
