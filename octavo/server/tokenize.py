"""POST /tokenize and /detokenize: token ids of a text or of a conversation, and back. The forms are vLLM's."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.calls import Call
from octavo.server.chat import written
from octavo.server.chat_fields import ChatRequest
from octavo.server.errors import bad_request, json_response
from octavo.server.fields import Refused, RequestBody, about
from octavo.server.messages import chat_messages
from octavo.server.parse import ignored_header, parse
from octavo.server.routes import prepared
from octavo.server.routing import Routes
from octavo.server.service import Service

TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"


class TokenizeRequest(RequestBody, kw_only=True):
    """POST /tokenize."""

    REFUSED: ClassVar[dict[str, Refused]] = {
        name: ChatRequest.REFUSED[name] for name in ("chat_template", "mm_processor_kwargs")
    }

    model: Annotated[
        str | None, about("A name in /v1/models: of the model, or of a LoRA adapter; another is a 404.")
    ] = None
    prompt: Annotated[str | None, about("A text. Either this or messages.")] = None
    messages: Annotated[list[dict[str, Any]] | None, about("A conversation, as in chat.")] = None
    add_special_tokens: Annotated[
        bool | None,
        about("Add what the tokenizer asks for, as BOS. Default of messages: where the template wrote none."),
    ] = None
    return_token_strs: Annotated[bool | None, about("Tell the vocabulary's spelling of each token.")] = None
    add_generation_prompt: Annotated[bool | None, about("As in chat.")] = None
    continue_final_message: Annotated[bool | None, about("As in chat.")] = None
    documents: Annotated[list[dict[str, Any]] | None, about("As in chat.")] = None
    tools: Annotated[list[dict[str, Any]] | None, about("As in chat.")] = None
    reasoning_effort: Annotated[str | None, about("As in chat.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("As in chat.")] = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give prompt or messages", "prompt", "missing_required_parameter")
        for name in _OF_CHAT:
            if self.messages is None and getattr(self, name) is not None:
                raise bad_request(f"{name} needs messages", name)

    def chat(self) -> ChatRequest:
        """The conversation as a request of chat."""
        return ChatRequest(messages=self.messages or [], **{name: getattr(self, name) for name in _OF_CHAT})


_OF_CHAT = (
    "add_generation_prompt", "continue_final_message", "documents", "tools", "reasoning_effort", "chat_template_kwargs"
)  # fmt: skip


class DetokenizeRequest(RequestBody, kw_only=True):
    """POST /detokenize."""

    model: Annotated[
        str | None, about("A name in /v1/models: of the model, or of a LoRA adapter; another is a 404.")
    ] = None
    tokens: Annotated[list[int], about("Token ids.")]


def add_token_routes(routes: Routes, service: Service) -> None:
    @routes.post(TOKENIZE)
    async def tokenize(http: Request) -> Response:
        """The token ids of a text or a conversation, of any length."""
        answer, ignored = await prepared(service, http, _tokenize)
        return json_response(answer, headers=ignored_header(ignored))

    @routes.post(DETOKENIZE)
    async def detokenize(http: Request) -> Response:
        """The text of token ids, special tokens included."""
        answer, ignored = await prepared(service, http, _detokenize)
        return json_response(answer, headers=ignored_header(ignored))


def _tokenize(service: Service, body: bytes, call: Call) -> tuple[dict[str, Any], list[str]]:
    request, ignored = parse(body, TokenizeRequest, service.config.strict)
    service.served(request.model)
    tokenizer, bounds = service.tokenizer, service.client.bounds
    assert tokenizer is not None and service.chat is not None and bounds is not None
    add = request.add_special_tokens
    if request.messages is not None:
        messages = chat_messages(request.messages, ignored)
        text = written(service, request.chat().chat_options, messages, ignored).text
        ids = service.tokens(text, "messages", partial(service.chat.encode, add_special_tokens=add))
    else:
        encode = partial(tokenizer.encode, add_special_tokens=add is not False)
        ids = service.tokens(request.prompt or "", "prompt", encode)
    answer = {"count": len(ids), "max_model_len": bounds.max_model_len, "tokens": ids, "token_strs": None}
    if request.return_token_strs:
        answer["token_strs"] = [tokenizer.id_to_token(i) for i in ids]
    return answer, ignored


def _detokenize(service: Service, body: bytes, call: Call) -> tuple[dict[str, Any], list[str]]:
    request, ignored = parse(body, DetokenizeRequest, service.config.strict)
    service.served(request.model)
    tokenizer = service.tokenizer
    assert tokenizer is not None
    for i in request.tokens:
        if tokenizer.piece(i, False) is None:
            raise bad_request(
                f"tokens has {i}, which is no token; the tokenizer has ids 0 to {tokenizer.vocab_size - 1}", "tokens"
            )
    return {"prompt": tokenizer.decode(request.tokens, skip_special_tokens=False)}, ignored
