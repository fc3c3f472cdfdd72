# SPDX-License-Identifier: Apache-2.0
"""Floor 0. What it means for a run that goes on if its configuration has changed.

Every field has one of five consequences. Most of a section share one; the exceptions
are named. A field that is new and stands in no table changes the course of a run, which
is what is told of it.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxmoe.config_base import ConfigError, mistake

SAFE = "safe: the same run up to rounding"
NO_EFFECT = "safe: it counts at the start of a run only"
COURSE = "another course from here on"
DATA = "other data: not the run that was begun"
MODEL = "another model: not the function that was trained"

_SECTIONS = {
    "Mesh": SAFE,
    "Pipeline": SAFE,
    "Balancer": SAFE,  # where experts are; the loss does not change
    "Checkpoint": SAFE,
    "Train": SAFE,
    "Optimizer": COURSE,
    "MoE": COURSE,
    "Data": DATA,
    "Model": MODEL,
}
_FIELDS = {
    **dict.fromkeys(("Train.seed", "Train.init_from", "Model.init_std"), NO_EFFECT),
    **dict.fromkeys(("Train.steps", "Train.nonfinite"), COURSE),
    **dict.fromkeys(("Model.remat", "MoE.exchange"), SAFE),
    **dict.fromkeys(("Model.compute_dtype", "MoE.exchange_dtype"), COURSE),
    **dict.fromkeys(
        ("Data.num_threads", "Data.prefetch_batches", "Data.held_out_source"), SAFE
    ),
    **dict.fromkeys(("Data.max_broken", "Data.epochs"), COURSE),
    **dict.fromkeys(
        (
            *("MoE.num_experts", "MoE.top_k", "MoE.router", "MoE.normalize_weights"),
            *("MoE.expert_width", "MoE.num_shared_experts", "MoE.num_groups"),
            *("MoE.top_groups", "MoE.route_scale"),
        ),
        MODEL,
    ),
}


class Change(NamedTuple):
    """A field that differs; values as they stand in config.gin, or 'absent'."""

    field: str
    then: str
    now: str

    @property
    def consequence(self) -> str:
        """What it means for the run."""
        section = self.field.partition(".")[0]
        return _FIELDS.get(self.field, _SECTIONS.get(section, COURSE))

    def __str__(self) -> str:
        return f"{self.field} was {self.then} and is {self.now}"


def changes(then: str, now: str) -> list[Change]:
    """The fields in which two texts of config.gin differ."""
    old, new = _fields(then), _fields(now)
    return [
        Change(name, old.get(name, "absent"), new.get(name, "absent"))
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]


def _fields(text: str) -> dict[str, str]:
    lines = (line.partition("#")[0] for line in text.splitlines())
    pairs = (line.partition("=") for line in lines)
    return {name.strip(): value.strip() for name, is_field, value in pairs if is_field}


def refuse_another_model(step: int, found: list[Change]) -> None:
    """Refuses changes under which the saved weights would be another function.

    Where arrays differ in shape the checkpoint itself does not fit, and says so. This
    is for those that would fit and go on in silence.

    Raises:
      ConfigError: naming them all.
    """
    # A field that one of the two versions of jaxmoe does not know is no wish.
    known = [c for c in found if "absent" not in (c.then, c.now)]
    if models := [str(change) for change in known if change.consequence == MODEL]:
        raise mistake(
            f"since step {step} {'; '.join(models)}",
            "a run goes on only with the function that its weights were trained for",
            "Set what differs back, or start a new run, with Train.init_from for the"
            " weights",
        )


def with_changes(error: ConfigError, found: list[Change]) -> ConfigError:
    """The same error, told with the fields that may be its reason."""
    if not found:
        return error
    return ConfigError(
        f"{error}\nSince it was saved the configuration has changed:\n  "
        + "\n  ".join(map(str, found))
    )
