"""The families of tool calls, and which of them a chat template speaks."""

from __future__ import annotations

from octavo.text.parser import MessageParser
from octavo.text.tools.deepseek import DeepSeek, DeepSeekV31
from octavo.text.tools.granite import Granite
from octavo.text.tools.harmony import Harmony
from octavo.text.tools.hermes import Hermes
from octavo.text.tools.llama import Llama3
from octavo.text.tools.mistral import Mistral, MistralNamed
from octavo.text.tools.pythonic import Pythonic
from octavo.text.tools.shape import Shape
from octavo.text.tools.tagged import Glm, QwenXml

GENERIC = "generic"
"""The form of models whose template knows no tools: Hermes', asked for in a system message of ours."""

FAMILIES: dict[str, tuple[type[MessageParser], Shape]] = {
    "hermes": (Hermes, Hermes.shape),
    "llama3": (Llama3, Llama3.shape),
    "pythonic": (Pythonic, Pythonic.shape),
    "mistral": (Mistral, Mistral.shape),
    "mistral-named": (MistralNamed, MistralNamed.shape),
    "granite": (Granite, Granite.shape),
    "deepseek": (DeepSeek, DeepSeek.shape),
    "deepseek-v3.1": (DeepSeekV31, DeepSeekV31.shape),
    "glm": (Glm, Glm.shape),
    "qwen-xml": (QwenXml, QwenXml.shape),
    "harmony": (Harmony, Harmony.shape),
    GENERIC: (Hermes, Hermes.shape),
}

_SIGNS: tuple[
    tuple[str, tuple[str, ...]], ...
] = (  # what a template of the family holds, all of it; the first that fits
    ("harmony", ("<|channel|>", "<|message|>")),
    ("mistral-named", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek-v3.1", ("<｜tool▁call▁begin｜>",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen-xml", ("<tool_call>", "<function=")),
    ("granite", ("<|tool_call|>",)),
    ("granite", ("<|start_of_role|>", "<tool_call>[")),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("[func_name1(params_name1=",)),
    ("llama3", ('"parameters": dictionary of argument name',)),
    ("llama3", ("<|python_tag|>",)),
    ("pythonic", ("<|python_start|>",)),
)


def detect(template: str) -> str:
    """The family that a chat template speaks; GENERIC where it speaks none that is known."""
    for family, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return family
    return GENERIC
