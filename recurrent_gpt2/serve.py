"""An OpenAI-compatible server of one checkpoint, with exits: `transformers serve`, told how to load and check it.

    python -m recurrent_gpt2.serve CHECKPOINT --port 8000

`POST /v1/completions` streams or not. The checkpoint's own exit policy applies, and a request may choose another:

    {"prompt": "...", "max_tokens": 20, "generation_config": {"exit_policy": "acceleration", "num_loops": 24}}

`usage.loop_steps` of an answer is the mean number of loop steps of its tokens in each group, prompt included. Requests
are answered one after the other by `generate`; for many at once there is vLLM (`vllm_plugin.py`). It needs
`pip install -e '.[serve]'`.
"""

import argparse
import copy
import json
import uuid
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from transformers.utils.import_utils import is_serve_available

if not is_serve_available():
    raise ImportError("the server needs fastapi, openai, pydantic and uvicorn: pip install -e '.[serve]'")

import uvicorn
from fastapi import HTTPException
from fastapi.responses import JSONResponse
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import BaseHandler, GenerateManager, GenerationState, set_torch_seed

from .exit_policies import resolve_exit_policy
from .generation_recurrent_gpt2 import LOOP_ARGUMENTS
from .loop_cache import check_cache_strategy

logger = logging.get_logger(__name__)

# What a request may ask for without being told, unless the checkpoint itself loops more.
MAX_LOOPS = 64
# Below it the likeliest token is taken: logits that are divided by less overflow.
LEAST_TEMPERATURE = 1e-5
# Requests whose steps are kept until their answers end.
REMEMBERED = 1000
# Routes of `transformers serve` that a server of one checkpoint does not have.
OTHER_ROUTES = {"/load_model", "/reset", "/v1/responses", "/v1/systemone", "/v1/audio/transcriptions"}
# Fields of a generation config that a request may set: the loops, sampling, lengths.
ALLOWED = {
    *LOOP_ARGUMENTS, "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty",
    "no_repeat_ngram_size", "max_new_tokens", "min_new_tokens", "eos_token_id", "bad_words_ids", "suppress_tokens",
}  # fmt: skip
# Fields of the API that would be ignored, and the values that ask for nothing.
NOT_SUPPORTED = {"best_of": 1, "echo": False, "logprobs": None, "n": 1, "presence_penalty": 0}


class CheckpointManager(ModelManager):
    """Has the one model. It is loaded by the auto classes, which find it wherever its code is."""

    def _load_processor(self, model_id_and_revision: str, gguf_file: str | None = None):
        return AutoTokenizer.from_pretrained(self.force_model)

    def _load_model(self, model_id_and_revision: str, *args, **kwargs):
        model = AutoModelForCausalLM.from_pretrained(
            self.force_model, dtype=self.dtype, trust_remote_code=self.trust_remote_code
        )
        device = self.device
        if device == "auto":
            device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        return model.eval().to(device)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict]:
        return [{"id": served_name(str(self.force_model)), "object": "model", "created": 0, "owned_by": ""}]


class CountedModel:
    """The model, for one request: `generate` as ever, whose steps are then in `loop_steps`."""

    def __init__(self, model: Any, seed: int | None = None):
        self.model, self.seed = model, seed
        self.loop_steps: list[float] | None = None  # mean of each group

    def generate(self, streamer: Any = None, **arguments: Any):
        if self.seed is not None:  # now that no other request draws
            set_torch_seed(self.seed)
        held = None if streamer is None else HeldStreamer(streamer)
        outputs = self.model.generate(**arguments, streamer=held, return_dict_in_generate=True)
        if "loop_steps" in outputs:
            self.loop_steps = [round(mean, 3) for mean in outputs.loop_steps[0].float().mean(0).tolist()]
        if streamer is not None:
            streamer.end()
        return outputs.sequences


class HeldStreamer:
    """A streamer that is not told of the end, since what comes after the text is not known yet."""

    def __init__(self, streamer: Any):
        self.put = streamer.put

    def end(self) -> None:
        pass


class LoopGenerateManager(GenerateManager):
    """Runs `generate` on a thread of its own, one request after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, CountedModel] = {}  # the latest

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        counted = self._count(model, inputs, gen_config, request_id)
        return super().generate_streaming(counted, processor, inputs, gen_config, request_id, response_parser)

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        counted = self._count(model, inputs, gen_config, request_id)
        return await super().generate_non_streaming(counted, processor, inputs, gen_config, request_id)

    def _count(self, model: Any, inputs: Any, gen_config: Any, request_id: str) -> CountedModel:
        set_room(model, inputs, gen_config)
        if len(self.requests) >= REMEMBERED:  # those whose clients left are never asked for
            self.requests.pop(next(iter(self.requests)))
        seed = gen_config.__dict__.pop("request_seed", None)
        counted = self.requests[request_id] = CountedModel(model, seed)
        return counted

    def steps_of(self, request_id: str) -> list[float] | None:
        """Of a request that has ended, which is then forgotten."""
        counted = self.requests.pop(request_id, None)
        return None if counted is None else counted.loop_steps


class LoopGenerationState(GenerationState):
    def __init__(self) -> None:
        super().__init__()
        self.manager = LoopGenerateManager()

    def get_manager(self, model_id: str, use_cb: bool = False) -> LoopGenerateManager:
        return self.manager


class LoopHandler(BaseHandler):
    """What requests for completions and for chats have in common."""

    max_loops = MAX_LOOPS

    async def handle_request(self, body: dict, request_id: str):
        """As `transformers serve`, but what can't be answered gets a 400 and a sentence."""
        if body.get("model") == served_name(str(self.model_manager.force_model)):
            body.pop("model")
        for field, allowed in NOT_SUPPORTED.items():
            if body.get(field) not in (None, allowed):
                raise HTTPException(400, f"`{field}` is {body[field]!r}, but is not supported here: leave it out.")
        request_id = f"cmpl-{uuid.uuid4().hex}"  # the client's own may not be unique; it gets it back in the header
        try:
            return await super().handle_request(body, request_id)
        except (TypeError, ValueError) as error:
            raise HTTPException(400, str(error)) from error

    @property
    def checkpoint(self) -> Any:
        """The loaded model, with its tokenizer as `processor`."""
        return self.model_manager.loaded_models[self.model_manager.force_model]

    def _resolve_model(self, body: dict):
        _, model, processor = super()._resolve_model(body)
        return served_name(str(self.model_manager.force_model)), model, processor

    def _build_generation_config(self, body: dict, model_generation_config: Any, use_cb: bool = False):
        """The checkpoint's own, with what the request changes, checked before it waits for its turn."""
        generation_config = copy.deepcopy(model_generation_config)
        given = body.get("generation_config") or {}
        given = json.loads(given) if isinstance(given, str) else given
        if not isinstance(given, dict):
            raise ValueError(
                f"`generation_config` is {given!r}, but must be an object with fields such as `num_loops`."
            )
        for name, value in given.items():
            if name not in ALLOWED:
                raise ValueError(
                    f"`generation_config` has a field {name!r}, but may have: {', '.join(sorted(ALLOWED))}."
                )
            setattr(generation_config, name, value)
        if "exit_policy" in given and given["exit_policy"] is None:
            generation_config.exit_policy = "fixed"  # None stands for the checkpoint's own there
        if (temperature := body.get("temperature")) is not None:
            generation_config.do_sample = float(temperature) > LEAST_TEMPERATURE
            generation_config.temperature = float(temperature) if generation_config.do_sample else None
        if body.get("top_p") is not None:
            generation_config.top_p = float(body["top_p"])
        if body.get("seed") is not None:
            generation_config.request_seed = int(body["seed"])  # for `_count`, which takes it out again
        if (penalty := body.get("frequency_penalty")) is not None:
            if not -1 < float(penalty) <= 2:
                raise ValueError(f"`frequency_penalty` is {penalty!r}, but must be above -1 and at most 2.")
            generation_config.repetition_penalty = 1.0 + float(penalty)
        if body.get("stop"):
            generation_config.stop_strings = body["stop"]
        max_tokens = body.get("max_completion_tokens", body.get("max_tokens"))
        if max_tokens is not None:
            if type(max_tokens) is not int or max_tokens < 1:
                raise ValueError(f"`max_tokens` is {max_tokens!r}, but must be an int of at least 1.")
            generation_config.max_new_tokens = max_tokens
        generation_config.validate()
        self._check_loops(generation_config)
        return generation_config

    def _check_loops(self, generation_config: Any) -> None:
        config = self.checkpoint.model.config
        resolve_exit_policy(getattr(generation_config, "exit_policy", None), len(config.loop_groups))
        loops = config.loops_per_group(getattr(generation_config, "num_loops", None))
        most = max([self.max_loops, *config.loops_per_group()])
        if max(loops, default=0) > most:
            raise ValueError(f"`num_loops` is {max(loops)}, but this server runs at most {most} (`--max-loops`).")
        check_cache_strategy(getattr(generation_config, "cache_strategy", None) or config.cache_strategy)


class LoopCompletionHandler(LoopHandler, CompletionHandler):
    """`/v1/completions`, with the steps in `usage`."""

    async def _non_streaming(self, request_id: str, *args, **kwargs):
        response = await super()._non_streaming(request_id, *args, **kwargs)
        answer = json.loads(response.body)
        answer["usage"]["loop_steps"] = self.generation_state.manager.steps_of(request_id)
        return JSONResponse(answer)

    def _build_chunk_sse(self, request_id: str, model_id: str, *args, usage: Any = None, **kwargs) -> str:
        if usage is not None:
            usage.loop_steps = self.generation_state.manager.steps_of(request_id)
        return super()._build_chunk_sse(request_id, model_id, *args, usage=usage, **kwargs)


class LoopChatHandler(LoopHandler, ChatCompletionHandler):
    """`/v1/chat/completions`, for checkpoints whose tokenizer has a chat template."""

    async def handle_request(self, body: dict, request_id: str):
        if self.checkpoint.processor.chat_template is None:
            sentence = "this model continues texts and does not chat: its tokenizer has no chat template."
            raise HTTPException(400, f"{sentence} Use /v1/completions.")
        return await super().handle_request(body, request_id)


def served_name(checkpoint: str) -> str:
    """The name that requests may give for the model, beside its whole path."""
    return Path(checkpoint).name


def set_room(model: Any, inputs: Any, generation_config: Any) -> None:
    """Gives a request that names no length what room there is, and refuses one that has not enough."""
    prompt, positions = inputs["input_ids"].shape[-1], model.config.max_position_embeddings
    room = positions + 1 - prompt  # the last token is not fed to the model
    asked = generation_config.max_new_tokens
    if prompt == 0:
        raise ValueError("`prompt` is empty: give the model a text to continue.")
    if room < (asked or 1):
        raise ValueError(
            f"the prompt has {prompt} tokens and `max_tokens` is {asked}, but the model has positions for {positions} "
            "in all: shorten the prompt, or ask for less."
        )
    generation_config.max_new_tokens = asked or room


async def answer_error(request: Any, error: Any) -> JSONResponse:
    """An error as clients of the API expect it."""
    said = {"message": error.detail, "type": "invalid_request_error", "code": error.status_code}
    return JSONResponse({"error": said}, status_code=error.status_code)


def make_app(checkpoint: str, max_loops: int = MAX_LOOPS, **settings: Any):
    """The server as an ASGI application. `settings` are those of `ModelManager` (`device`, `dtype`, ...)."""
    models, state = CheckpointManager(force_model=str(checkpoint), **settings), LoopGenerationState()
    completions, chats = LoopCompletionHandler(models, state), LoopChatHandler(models, state)
    completions.max_loops = chats.max_loops = max_loops
    app = build_server(
        models,
        chats,
        completion_handler=completions,
        response_handler=None,
        transcription_handler=None,
        systemone_handler=None,
        generation_state=state,
    )
    app.add_exception_handler(HTTPException, answer_error)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") not in OTHER_ROUTES]
    return app


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m recurrent_gpt2.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a folder, or a name on the Hub")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--trust-remote-code", action="store_true", help="for a model that is not of this package")
    parser.add_argument("--max-loops", type=int, default=MAX_LOOPS, help="most loops that a request may ask for")
    given = parser.parse_args(arguments)
    settings = {"device": given.device, "dtype": given.dtype, "trust_remote_code": given.trust_remote_code}
    uvicorn.run(make_app(given.checkpoint, given.max_loops, **settings), host=given.host, port=given.port)


if __name__ == "__main__":
    main()
