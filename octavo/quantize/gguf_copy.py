"""Writing a GGUF file anew with other types for its matrices; all else is what the file says."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter

from octavo.quantize.gguf_output import GgufOutput, Table
from octavo.weights.gguf_checkpoint import hf_name
from octavo.weights.gguf_config import TABLES, GgufConfig
from octavo.weights.gguf_names import Family
from octavo.weights.gguf_parts import read_model

_OWN = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version", "general.alignment")
_GONE = ("split.", "quantize.")
"""Keys of several parts, and of how the matrices were quantised before."""


class GgufCopy(GgufOutput):
    """`convert.Output` of a GGUF model."""

    def _architecture(self) -> tuple[str, Family]:
        self._gguf = read_model(self._source)
        return str(self._gguf.metadata["general.architecture"]), GgufConfig(self._gguf, str(self._source)).family

    def _gguf_names(self) -> dict[str, str]:
        path = str(self._source)
        return {hf_name(name, self._family, path): name for name in self._gguf.tensors if name not in TABLES}

    def _write_metadata(self, writer: GGUFWriter) -> dict[str, Table]:
        for key, field in GGUFReader(Path(self._gguf.file.path)).fields.items():
            value = None if key.startswith((*_OWN, *_GONE)) else field.contents()
            if value is not None and value != []:  # which the library does not write
                kind = field.types[0]
                writer.add_key_value(key, value, kind, field.types[-1] if kind is GGUFValueType.ARRAY else None)
        tables = {name: tensor for name, tensor in self._gguf.tensors.items() if name in TABLES}
        return {name: Table(t.source, t.shape, t.file.data[t.start : t.stop]) for name, t in tables.items()}

    def _check_vocabulary(self) -> None:
        """It is the same."""
