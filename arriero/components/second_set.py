"""Whether an engine keeps a second set of its weights, in which a version arrives while the first decodes.

It costs the memory of the weights once more. `auto` looks at the memory that is there once the model is
loaded, and says in the log what it found.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from arriero.components.model_directory import LLAMAS, model_type

if TYPE_CHECKING:
    import torch

    from arriero.components.generator import Generator
    from arriero.engine.runtime.context import Context

SecondSet = bool | Literal["auto"]

# Of the memory that is free, as other roles start beside this one and caches grow.
_SHARE = 0.25
# vLLM has its cache already where it was measured on a GPU; what it leaves free nobody else takes.
_SHARE_BESIDE_CACHE = 0.9
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Room:
    """Bytes of a rank's weights, and of what is free where they are; may travel between processes."""

    weight_bytes: int
    free_bytes: int
    device: str


def room_for(weight_bytes: int, device: torch.device) -> Room:
    """What `device` has to spare now: a GPU, or the host within the limit of its control group."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return Room(weight_bytes, free, device.type)
    import psutil

    free = int(psutil.virtual_memory().available)
    return Room(weight_bytes, min(free, _left_to_group(free)), device.type)


def _left_to_group(otherwise: int, group: Path = Path("/sys/fs/cgroup")) -> int:
    """What the control group (version 2) of a container may still take; `otherwise` where it has no limit."""
    with suppress(OSError, ValueError):
        most, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return max(int(most) - int(used), 0)
    return otherwise


def second_set(config: Generator, context: Context, rooms: Sequence[Room]) -> bool:
    """Whether the engine gets one, said in the log and counted; `rooms` of each of its ranks."""
    chosen = config.standby
    if chosen == "auto":
        why = _unwanted(config, context) or _too_large(config, rooms)
        chosen = not why
        if why:
            _log.info("standby=auto: off, versions are put in use while the generator stands still: %s", why)
        else:
            _log.info(
                "standby=auto: on, a second set of weights takes %d MB of %d MB free",
                rooms[0].weight_bytes >> 20, rooms[0].free_bytes >> 20,
            )  # fmt: skip
    if chosen:
        context.count("second_sets", 1)
    return chosen


def _unwanted(config: Generator, context: Context) -> str:
    if config.placement.devices == "turns":
        return "nobody decodes while weights arrive, for the devices are used in turns"
    if context.deterministic:
        return "a deterministic run decodes nothing while weights arrive"
    if config.engine == "vllm" and (kind := model_type(config.model)) not in LLAMAS:
        return f"vLLM can have a second set of weights for {', '.join(LLAMAS)} only, not {kind}"
    return ""


def _too_large(config: Generator, rooms: Sequence[Room]) -> str:
    """Why the second set of a rank doesn't fit; on a host all ranks share what is free."""
    on_gpu = rooms[0].device == "cuda"
    share = _SHARE_BESIDE_CACHE if on_gpu and config.engine == "vllm" else _SHARE
    together = 1 if on_gpu else len(rooms)
    for room in rooms:
        if room.weight_bytes * together > share * room.free_bytes:
            remedy = ", or lower vllm.memory_share" if on_gpu and config.engine == "vllm" else ""
            return (
                f"{room.weight_bytes * together >> 20} MB are more than {share:g} of the "
                f"{room.free_bytes >> 20} MB free; set standby=true if they fit all the same{remedy}"
            )
    return ""
