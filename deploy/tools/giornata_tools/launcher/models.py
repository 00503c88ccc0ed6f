"""The checkpoints to serve, and the adapters and segmenter that ship with the trained one."""

from __future__ import annotations

import asyncio
import hashlib
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from giornata.families import Family
from giornata_tools.checkout import ADAPTERS, LAB, SEGMENTER, TRAINED
from giornata_tools.launcher.process import LaunchError

# The checkpoints to serve: those that are named, else the trained one that ships, or a random one.


READY_S: Final = 120.0
"""How long the services may take to load the built-in model."""
DOWNLOAD_S: Final = 4 * 3600.0
"""How long the services may take with any other model: tens of gigabytes may have to come over the network first."""


@dataclass(frozen=True)
class StackModel:
    """The model that the services are told to load."""

    source: str
    """Local folder or hub id."""
    name: str | None = None
    """How requests call it; None for the folder's name."""
    ready_s: float = READY_S
    """How long the services may take until they have it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the services that load it."""

    @property
    def served_name(self) -> str:
        """Return how requests call it: its name, or else its folder's or repository's."""
        return self.name or Path(self.source).resolve().name

    @classmethod
    def read(cls, text: str) -> StackModel:
        """The model that `text` names: NAME=FOLDER_OR_ID, or a folder or hub id alone."""
        if named := _NAMED.fullmatch(text):
            return cls(named["source"], named["name"], DOWNLOAD_S)
        return cls(text, None, DOWNLOAD_S)


_NAMED: Final = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]{0,95})=(?P<source>.+)")


async def choose_all(
    named: Sequence[str],
    env: Mapping[str, str],
    family: Family | None,
    cache: Path,
    say: Callable[[str], None],
) -> tuple[StackModel, ...]:
    """The models that are `named`, as :meth:`StackModel.read` reads them; where none is, the one of :func:`choose`.

    Raises:
        LaunchError: a folder is not there, two models have one name, or the build failed.
    """
    if not named:
        return (await choose(env, family, cache, say),)
    models = [StackModel.read(text) for text in named]
    for model in models:
        _check_source(model.source, "--model", say)
    if common := env.get("GIORNATA_MODEL_NAME"):
        if len(models) > 1:
            raise LaunchError(
                f"GIORNATA_MODEL_NAME is {common}, one name, and {len(models)} models are to be served; leave it out, "
                "and write --model NAME=FOLDER."
            )
        models = [StackModel(each.source, each.name or common, each.ready_s) for each in models]
    if twice := repeated_name(models):
        raise LaunchError(f"Several models have the name {twice}; give each its own by --model NAME=FOLDER.")
    return tuple(models)


def repeated_name(models: Sequence[StackModel]) -> str | None:
    """A name that more than one of `models` has."""
    name, times = Counter(model.served_name for model in models).most_common(1)[0]
    return name if times > 1 else None


def _check_source(source: str, said_by: str, say: Callable[[str], None]) -> None:
    """Say that `source` is to be fetched, where it is no folder; LaunchError where it can only be one."""
    if Path(source).is_dir():
        return
    if source.startswith((".", "/", "~")):
        raise LaunchError(f"{said_by} names the folder {source}, which does not exist.")
    say(f"{source} is no folder: it comes from the hub, or from the hub's cache. A download takes its time.")


async def choose(
    env: Mapping[str, str], family: Family | None, cache: Path, say: Callable[[str], None]
) -> StackModel:
    """The model that `env` names, else one of `family` with random weights (built into `cache` once), else the trained.

    Raises:
        LaunchError: the named folder is not there, the lab is not, or the build failed.
    """
    name = env.get("GIORNATA_MODEL_NAME") or None
    if source := env.get("GIORNATA_MODEL"):
        _check_source(source, "GIORNATA_MODEL", say)
        return StackModel(source, name, DOWNLOAD_S)
    if family is None:
        return StackModel(str(TRAINED), name)
    if (lab := find_spec(LAB)) is None or lab.origin is None:
        raise LaunchError(
            f"Models of the family {family} with random weights are built by the lab, giornata-lab, which is not "
            "installed: run `make setup` in the checkout."
        )
    builder = sorted((Path(lab.origin).parent / "model" / "random").glob("*.py"))
    folder = cache / f"{family}-{builder_digest(*builder)}"
    if not folder.exists():
        say(f"Building the model {family} into {folder} (once).")
        await _build(family, folder)
    return StackModel(str(folder), name or f"tiny-{family}")


def builder_digest(*files: Path) -> str:
    """12 hex digits of the sha-256 over the builder's source files: another builder, another checkpoint."""
    total = hashlib.sha256()
    for path in files:
        total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]


async def _build(family: Family, folder: Path) -> None:
    """Build beside `folder` and rename, so that it is there as a whole or not at all.

    In a process of its own: building imports torch, which the launcher need not hold.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=".building-", dir=folder.parent, ignore_cleanup_errors=True
    ) as unfinished:
        command = (sys.executable, "-m", f"{LAB}.model.random.build", unfinished, "--family", family)
        child = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            output, _ = await child.communicate()
        finally:
            if child.returncode is None:  # we were told to stop
                child.kill()
                await child.wait()
        if child.returncode:
            said = output.decode(errors="replace")[-2000:]
            raise LaunchError(f"The model {family} could not be built:\n{said}")
        publish(Path(unfinished), folder)


def publish(unfinished: Path, folder: Path) -> None:
    """Give a finished build its name; a build that another process has named first stays."""
    try:
        unfinished.rename(folder)
    except OSError:  # "directory not empty" has no class of its own
        if not folder.is_dir():
            raise


# The adapters that ship with the trained model, and what tells services to offer them.


NETS: Final = "GIORNATA_CONTROLNETS"
LORAS: Final = "GIORNATA_LORA_SHARED_FOLDER"
SHIPPED_NETS: Final = ADAPTERS / "controlnets"
"""A folder for each ControlNet."""
SHIPPED_LORAS: Final = ADAPTERS / "loras"
"""MODEL/NAME.safetensors, as the LoRA store's shared folder has them."""


def with_controlnets(models: Sequence[StackModel], env: Mapping[str, str]) -> tuple[StackModel, ...]:
    """`models`, the trained one with the ControlNets that ship; as they are where `env` says which ones are served."""
    if NETS in env or not SHIPPED_NETS.is_dir():
        return tuple(models)
    nets = ",".join(str(folder) for folder in sorted(SHIPPED_NETS.iterdir()) if folder.is_dir())
    return tuple(replace(each, env={**each.env, NETS: nets}) if is_trained(each) else each for each in models)


def service_controlnets(models: Sequence[StackModel], env: Mapping[str, str]) -> str:
    """What a ControlNet service computes: what `env` names, else what denoisers of one of `models` have; or nothing."""
    return env.get(NETS, "") or next((each.env[NETS] for each in models if each.env.get(NETS)), "")


def shared_loras(models: Sequence[StackModel], env: Mapping[str, str]) -> Mapping[str, str]:
    """Environment of the LoRA store, for the LoRAs that ship.

    It is empty where `env` names another shared folder, or none of `models` is the trained one by its own name: LoRAs
    are for models by name.
    """
    served = any(is_trained(each) and each.served_name == TRAINED.name for each in models)
    return {LORAS: str(SHIPPED_LORAS)} if served and LORAS not in env and SHIPPED_LORAS.is_dir() else {}


def is_trained(model: StackModel) -> bool:
    """Return whether it is the trained model that ships."""
    return Path(model.source).resolve() == TRAINED.resolve()


# The segmenter that ships with the trained model, and what tells prepost to make masks from words with it.


MASKS: Final = "GIORNATA_MASK_MODEL"
REFINER: Final = "GIORNATA_MASK_REFINER"


def shipped_masks(models: Sequence[StackModel], env: Mapping[str, str]) -> Mapping[str, str]:
    """Environment of prepost, for masks from words in the scenes of the trained model.

    It is empty where `env` says what makes masks, or by an empty `MASKS` that nothing does. It is empty, too, where one
    of `models` is not the trained one: its pictures would be searched by a segmenter that knows nothing of them.
    """
    said = MASKS in env or bool(env.get(REFINER))
    ours = SEGMENTER.is_dir() and all(map(is_trained, models))
    return {MASKS: str(SEGMENTER)} if ours and not said else {}
