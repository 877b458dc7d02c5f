"""Prints the logprobs of the choices of local.jsonl and how often the right one is likeliest, by `octavo.LLM`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from octavo import LLM, SamplingParams


def main(model: str) -> None:
    lines = Path(__file__).with_name("local.jsonl").read_text().splitlines()
    docs = [json.loads(line) for line in lines]
    with LLM(model, kv_cache_memory="8MiB") as llm:
        encode = llm.get_tokenizer().encode
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        scores = []
        for doc in docs:
            start = len(encode(doc["question"], add_special_tokens=False))
            prompts = [encode(f"{doc['question']} {choice}", add_special_tokens=False) for choice in doc["choices"]]
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
            scores.append([_sum(output.prompt_logprobs, output.prompt_token_ids, start) for output in outputs])
    right = sum(row.index(max(row)) == doc["answer"] for row, doc in zip(scores, docs, strict=True))
    print(json.dumps({"logprobs": scores, "accuracy": right / len(docs)}))


def _sum(scored: object, ids: list[int], start: int) -> float:
    assert isinstance(scored, list)
    return float(sum(scored[i][ids[i]].logprob for i in range(start, len(ids))))


if __name__ == "__main__":
    main(sys.argv[1])
