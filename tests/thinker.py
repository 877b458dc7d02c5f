"""A tiny model that may reason: its tokenizer has the tags, and its template opens them on request."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.serving import Server

START, END = 318, 319
"""The tokens of <think> and </think>."""

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking %}<think>{% endif %}{% endif %}{# </think> #}"
)


def add_special_tokens(folder: Path, tokens: dict[str, int]) -> None:
    """Rename tokens of a model's tokenizer so that they are these special ones."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    for tag, token_id in tokens.items():
        old = next(token for token, i in vocab.items() if i == token_id)
        del vocab[old]
        merges[:] = [merge for merge in merges if "".join(merge) != old]
        vocab[tag] = token_id
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": token_id, "content": tag})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def thinking_model(data: Path, folder: Path) -> Path:
    """Made in `folder`."""
    model = folder / "thinker"
    shutil.copytree(data / "arch" / "llama", model)
    add_special_tokens(model, {"<think>": START, "</think>": END})
    return model


def thinking_server(data: Path, folder: Path, *options: str, template: str = TEMPLATE) -> Server:
    """folder: where its model is made."""
    model = thinking_model(data, folder)
    return Server(
        model, "--served-model-name", "tiny", "--max-model-len", "1024", "--chat-template", template, *options
    )
