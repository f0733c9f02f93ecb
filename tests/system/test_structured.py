"""Constrained outputs on real workers, requested by Baton's client and by OpenAI's. A prefill group computes the first
token, and a generation group, which may die meanwhile, computes the rest."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from baton import AsyncClient
from baton.errors import InvalidArgumentError
from baton.sampling_params import SamplingParams, StructuredOutput
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.clients import HOST, Answer
from tests.support.clusters.cluster import cluster
from tests.support.clusters.planners import deciding_planner
from tests.support.engines.generation import prompt
from tests.support.models.tiny_tokenizer import chat_letters, ids_of, text_of
from tests.support.schemas import random_schema
from tests.support.wire.http_gateway import http_gateway

pytestmark = pytest.mark.integration

BY_CHAIN = OrchestratorConfig(disaggregation="always")
TERSE = {ids_of('"')[0]: 4.0, ids_of("}")[0]: 3.0, ids_of("]")[0]: 3.0}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def params_of(schema: dict[str, Any], seed: int, **fields: Any) -> SamplingParams:
    form = StructuredOutput(json=json.dumps(schema))
    return SamplingParams(
        temperature=1.0, seed=seed, max_tokens=200, logit_bias=TERSE, structured_output=form, **fields
    )


async def test_the_first_token_by_a_chain_has_the_form() -> None:
    async with cluster(planner=deciding_planner(max_ranks=2), config=BY_CHAIN) as made:
        for seed in range(8):
            answer = await made.ask(made.request(prompt(40, seed), params_of(random_schema(seed), seed)))
            assert answer.finished is not None and answer.finished.timings.prefill.ranks
            assert answer.text.startswith("{")
            if answer.token_ids[-1] >= 95:
                jsonschema.validate(json.loads(answer.text), random_schema(seed))
        assert (await made.state()).num_degraded == 0


async def test_choices_share_the_prompt_and_each_has_the_form() -> None:
    async with cluster(planner=deciding_planner(max_ranks=2), config=BY_CHAIN) as made:
        answer = await made.ask(made.request(prompt(40), params_of(SCHEMA, 3, n=4)))
        texts = [answer.text, *(text_of(ids) for _, ids in sorted(answer.others.items()))]
        assert len(texts) == 4 and len(set(texts)) > 1
        for text in texts:
            jsonschema.validate(json.loads(text), SCHEMA)


async def test_an_output_keeps_its_form_when_its_group_dies() -> None:
    expression = "[a-c]{150}[0-9]{5}"
    params = SamplingParams(
        temperature=1.0, seed=7, max_tokens=200, structured_output=StructuredOutput(regex=expression)
    )
    async with cluster(num_groups=2) as made:
        expected = await made.ask(made.request(prompt(12), params))
        for gate in made.group_gates:
            gate.shut(num_passes=60)  # some tokens come, and not all
        stream = made.open(made.request(prompt(12), params))
        answer = Answer()
        await answer.read(stream, 20)
        dying = await made.busy_group()
        await made.group_gates[dying].until_reached()
        await made.lose_group(dying)
        await answer.drain(stream)
        assert answer.finished is not None and answer.finished.usage.num_attempts > 1
        assert answer.token_ids == expected.token_ids
        assert re.fullmatch(expression, answer.text)
        made.groups.pop(dying)


async def test_what_is_not_supported_is_refused_before_it_is_queued() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"json": {"properties": {"a": {"items": {"uniqueItems": True}}}}}, "#/properties/a/items: Unimplemented"),
        ({"regex": "a(b"}, "sampling.structured_output.regex cannot be compiled"),
        ({"grammar": "start: x"}, 'unknown name: "x"'),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"rejects": "a"}, "rejects is unknown"),
    ]
    async with cluster() as made, AsyncClient(f"{HOST}:{made.server.port}") as client:
        for form, reason in wrong:
            with pytest.raises(InvalidArgumentError, match=re.escape(reason)):
                await client.generate("Hi", structured_output=form).collect()
        seen = await made.metrics()
        assert not any(value for name, value in seen.items() if name.startswith("baton_requests_total"))


async def test_openais_client_gets_the_form_that_it_asks_for(tmp_path: Path) -> None:
    async with cluster() as made, http_gateway(f"{HOST}:{made.server.port}", chat_letters(tmp_path)) as http:
        asked: dict[str, Any] = {"model": "letters", "messages": [{"role": "user", "content": "Where to?"}], "seed": 3}
        chats: Any = http.openai.chat.completions
        completions: Any = http.openai.completions
        schema = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
        answer = await chats.create(**asked, response_format=schema, logprobs=True, top_logprobs=20)
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
        assert answer.choices[0].finish_reason == "stop"
        answer = await chats.create(**asked, response_format={"type": "json_object"}, max_tokens=20)
        assert (answer.choices[0].message.content or "").startswith("{")
        for more, expression in [
            ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
            ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
            ({"structured_outputs": {"grammar": 'start: "a" b "a"\nb: "b" | b "b"'}}, "ab+a"),
            ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
            ({"guided_regex": "x+y"}, "x+y"),
        ]:
            text = await completions.create(
                model="letters", prompt="So: ", seed=5, max_tokens=200, extra_body=more, logit_bias={}
            )
            assert re.fullmatch(expression, text.choices[0].text), (more, text.choices[0].text)
        unsupported = {"type": "json_schema", "json_schema": {"name": "set", "schema": {"uniqueItems": True}}}
        with pytest.raises(openai.BadRequestError, match="not supported at #: Unimplemented keys"):
            await chats.create(**asked, response_format=unsupported)
