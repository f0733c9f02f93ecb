"""What users write against, frozen: names of `baton`, its clients' methods, fields of what they return, the CLI.

Whoever changes one of these changes it here too, and says so in CHANGELOG.md.
"""

import argparse
import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields

import pytest
from google.protobuf.message import Message

import baton
from baton.calls.cluster_state import (
    ClusterState,
    GenerationStatus,
    GroupState,
    PrefillStatus,
    Scaling,
    ScalingChange,
)
from baton.results.completion import Choice, Completion, ModelInfo, Usage
from baton.results.prefill_trace import (
    Placement,
    PlacementTerms,
    PrefillTrace,
    PrefixFetch,
    RankTiming,
    WidthChoice,
    WidthOption,
)
from baton.results.timings import DraftCounts, SpeculationTrace, Timings
from deploy.cli import GROUPS, build_parser

pytestmark = pytest.mark.integration

NAMES = """
    AsyncClient AsyncStream BatonError Choice Client ClusterState Completion DraftCounts DraftRound FinishReason
    GenerationStatus GroupState ModelInfo Placement PlacementTerms PrefillStatus PrefillTrace PrefixFetch RankTiming
    Reconnect RequestList RequestStatus SampledToken SamplingParams Scaling ScalingChange SpeculationTrace Stream
    StructuredOutput Timings TokenEvent TokenLogprob TokenOrigin TokenRange Usage WidthChoice WidthOption __version__
"""

CLIENT = {
    "__init__": "(self, target='127.0.0.1:50051', *, api_key=None, tenant=None, reconnect=None, clock=None)",
    "close": "(self)",
    "cluster_state": "(self, timeout_s=10.0, *, metadata=None)",
    "generate": "(self, prompt=None, *, messages=None, token_ids=None, params=None, request_id=None, model='',"
    " echo=False, deadline_s=None, priority='standard', metadata=None, exact=False, cache_salt='',"
    " **sampling)",
    "model": "(self, timeout_s=10.0, *, metadata=None)",
    "requests": "(self, timeout_s=10.0, *, num_ended=64, metadata=None)",
}
STREAM = {"cancel": "(self)", "collect": "(self)", "text": "(self)"}
STREAM_PROPERTIES = "finish output request_id timings usage"

FIELDS = {
    Choice: "index text tokens finish",
    Completion: "request_id choices prompt model seed exact num_prompt_tokens usage timings num_resumes",
    Usage: "num_prompt_tokens num_output_tokens num_attempts num_cached_tokens",
    Timings: "received_ns admitted_ns leased_ns first_token_ns finished_ns residency prefill speculation",
    SpeculationTrace: "num_steps sources",
    DraftCounts: "source num_rounds num_drafted num_accepted",
    PrefillTrace: "placement width ranks fetch",
    PrefixFetch: "source num_tokens num_bytes predicted_s took_s shortfall",
    Placement: "reason chain local",
    PlacementTerms: "queue_s prefill_s steps_s transfer_s others_s fetch_s",
    WidthChoice: "width num_ranks num_ahead num_jobs options",
    WidthOption: "width own_s others_s",
    RankTiming: (
        "rank tokens start_ns end_ns wait_s push_start_ns push_end_ns num_bytes_pushed num_bytes_sent layers"
        " num_messages_sent send_s num_bytes_shared"
    ),
    ModelInfo: "name max_tokens vocab_size dtype has_chat_template layout_fingerprint",
    ClusterState: "groups num_queued num_running num_degraded version num_queued_tokens why_not_serving why_degraded"
    " metrics_endpoint groups_away scaling",
    Scaling: "mode num_prefill num_generate explanation forecast_rate ttft_p95_s itl_p95_s changes",
    ScalingChange: "unix_ns explanation",
    GroupState: "name role endpoints epoch is_ready num_leaked num_requests is_drained is_broken generation ranks"
    " lender",
    baton.TokenEvent: "index token text unix_ns finish error choice prompt drafts origin",
    baton.TokenOrigin: "generation prefill predicted_step_s",
    baton.RequestList: "now_ns requests",
    baton.RequestStatus: "number request_id tenant state generation prefill usage timings reasons error num_failures",
    baton.DraftRound: "source num_drafts num_accepted num_tokens",
    baton.SampledToken: "token_id logprob top",
    baton.Reconnect: "num_connects num_resumes first_delay_s max_delay_s",
    baton.SamplingParams: "max_tokens min_tokens temperature top_k top_p min_p repetition_penalty presence_penalty"
    " frequency_penalty logit_bias seed stop stop_token_ids include_stop_str_in_output ignore_eos logprobs"
    " prompt_logprobs n num_drafts structured_output",
}

STATUSES: dict[type[Message], str] = {
    GenerationStatus: "num_slots num_free num_leased num_active num_quarantined num_bytes_held num_steps"
    " layout_fingerprint version kept kv num_preemptions imbalance last_step residency is_approximate kernels"
    " prefix_store speculation device num_device_bytes stall num_not_finite",
    PrefillStatus: "epoch epoch_error num_jobs progress num_jobs_done layout_fingerprint version stall kernels"
    " prefix_store",
}
"""Fields of the workers' own messages that a GroupState holds; further ones may come."""

SAMPLING = "--ignore-eos --max-tokens --min-p --seed --stop --temperature --top-k --top-p"
CONFIGURATION = "--config --set"
COMMANDS = {
    "bench": "--address --allow-eos --api --api-key-env --burstiness --concurrency --context --extra-body --json"
    " --lengths --model --output-tokens --plot --prompt-tokens --rate --repeat-prompts --requests --seconds --seed"
    " --system-tokens --target --temperature --text --think-time --timeout --trace --turns --url",
    "calibrate": "--anyway --device --dtype --seconds",
    "chaos": "--blows --cache --hung --log --model --requests --seed --seeds --set --slow",
    "config": CONFIGURATION,
    "doctor": CONFIGURATION,
    "drain": "group name --api-key-env --keep --target --timeout --undo",
    "evaluate": "model --alpha --budget --cache --context --device --dtype --json --link --mass --needles --plot"
    " --policies --pool --rows --selection --steps --text --threads --weights",
    "flip": "group name --api-key-env --target --timeout --undo",
    "gateway": "--address --api-key-env --cache --cluster --control-tokens-in-text --grace --host --log-format --model"
    " --orchestrator --port",
    "generate": "prompt --api-key-env --chat --deadline --echo --exact --n --no-usage --priority --target --tenant"
    f" {SAMPLING}",
    "http": "--allow-origin --allowed-host --api-key-env --cache --certificate --control-tokens-in-text"
    " --default-deadline --grace --host --keep-alive --keep-responses --log-format --max-connections-per-address"
    " --max-responses --model --no-console --otlp-endpoint --port --private-key --target --tool-format --trace-share"
    " --trust-tenant",
    "local": "prompt --cache --chat --colocated --dtype --model --no-timeline --ranks --threads --weights"
    f" {CONFIGURATION} {SAMPLING}",
    "plan": "model --acceptance --batch --chips --context --draft-keys --draft-model --drafts --dtype --engines"
    " --explain --groups --hardware --json --kv --kv-per-token --link-gb-s --output --params --plot --prompt --ranks"
    " --rate --shape --slots --speculation --threads --weights",
    "prepare": "model --alpha --cache --context --cost --dtype --first --free-keys --kinds --last --lookahead"
    " --most-share --output --ratios --reach --rows --steps --text --threads --weights",
    "reload": "name --api-key-env --group --model --target --timeout",
    "scale": "name number pool --api-key-env --target --timeout",
    "serve": f"--address {CONFIGURATION}",
    "simulate": "--attention-tflop-s --cached --contexts --hardware --linear-tflop-s --link-gb-s"
    " --link-us --model --plot --protocol --push-gb-s --ranks --shape",
    "simulate-traffic": "--advisory --cached-blocks --cold-start --cooldown --explain --flip --groups"
    " --hardware --itl --json --load --max --min --model --output --phases --plot --policy --prompt --ranks --rate"
    " --requests --seconds --seed --slots --speed --trace --ttft --whole-chooser",
    "status": "name --api-key-env",
    "stop": "name --address",
    "top": "name --api-key-env --interval --once --target",
    "trace": "request name --api-key-env --out --target",
}
"""Each command's arguments and options."""


def test_names_of_the_package() -> None:
    assert sorted(baton.__all__) == NAMES.split()
    assert set(NAMES.split()) <= set(dir(baton))


@pytest.mark.parametrize("name", NAMES.split())
def test_name_can_be_imported(name: str) -> None:
    assert getattr(baton, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'baton' has no attribute 'Nothing'"):
        baton.Nothing  # noqa: B018


def test_importing_the_package_loads_neither_grpc_nor_stubs() -> None:
    program = "import sys, baton; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True)
    loaded = set(run.stdout.split())
    assert "baton" in loaded and not {"grpc", "google.protobuf", "baton.v1"} & loaded


@pytest.mark.parametrize("client", [baton.Client, baton.AsyncClient])
def test_methods_of_the_clients(client: type) -> None:
    assert dict(public_methods(client)) == CLIENT


@pytest.mark.parametrize("stream", [baton.Stream, baton.AsyncStream])
def test_methods_of_the_streams(stream: type) -> None:
    methods = dict(public_methods(stream))
    del methods["__init__"]  # streams are made by clients
    assert methods == STREAM
    properties = [name for name, _ in inspect.getmembers(stream, inspect.isdatadescriptor) if not name.startswith("_")]
    assert properties == STREAM_PROPERTIES.split()


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_fields_of_what_clients_return(kind: type) -> None:
    assert [field.name for field in fields(kind)] == FIELDS[kind].split()


@pytest.mark.parametrize("kind", STATUSES, ids=lambda kind: kind.__name__)
def test_fields_of_what_workers_say(kind: type[Message]) -> None:
    assert set(STATUSES[kind].split()) <= set(kind.DESCRIPTOR.fields_by_name)


def test_the_help_lists_every_command_in_one_group() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(commands())


def test_errors_of_a_command_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["scale", "generate", "many"])
    assert capsys.readouterr().err.startswith("usage: baton scale ")


def test_commands() -> None:
    assert sorted(commands()) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_a_command(command: str) -> None:
    assert sorted(arguments(commands()[command])) == sorted(COMMANDS[command].split())


def public_methods(kind: type) -> Iterator[tuple[str, str]]:
    """Each public method and the constructor, with its parameters and their defaults."""
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name == "__init__" or not name.startswith("_"):
            parameters = inspect.signature(method).parameters.values()
            bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
            yield name, str(inspect.Signature(bare))


def commands() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    [choices] = [action.choices for action in build_parser()._actions if isinstance(action.choices, dict)]
    return choices


def arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The longest name of each option, and each argument's name; without help."""
    for action in parser._actions:
        if action.dest != "help":
            yield max(action.option_strings, key=len, default=action.dest)
