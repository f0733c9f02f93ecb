"""What a user writes becomes a configuration, or one line that says what is wrong with it."""

import os
import re
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.settings.base import meaning_of
from baton.settings.place import WorkerPlace
from deploy.config.cluster import ClusterConfig
from deploy.config.file import format_config, load_config, read_config
from deploy.config.sections import TenantSection
from orchestrator.requests.tenants import Tenant, hash_key
from tests.support.folders import ROOT
from tests.support.wire.secret import SECRET


def sections() -> list[type[Any]]:
    """Every section of the configuration, the whole included."""
    types = [field.type for field in fields(ClusterConfig)]
    return [ClusterConfig, TenantSection, *(each for each in types if isinstance(each, type) and is_dataclass(each))]


def test_without_file_or_assignments_all_is_default() -> None:
    assert load_config(None) == ClusterConfig()


def test_assignments_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('name = "mine"\n[prefill]\nnum_ranks = 3\nnum_threads = 2\n')
    config = load_config(path, ["prefill.num_ranks=4", "prefill.num_ranks=5"])
    assert (config.name, config.prefill.num_ranks, config.prefill.num_threads) == ("mine", 5, 2)


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("model.name=/models/my model", "/models/my model"),
        ('model.name="quoted"', "quoted"),
        ("model.name = spaced", "spaced"),
    ],
)
def test_a_bare_word_is_a_string(assignment: str, value: str) -> None:
    assert load_config(None, [assignment]).model.name == value


def test_a_file_is_named_from_where_the_command_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = load_config(None, ["generate.residency=infinigen", "generate.selection_file=found"]).generate
    assert (found.residency, found.selection_file) == ("infinigen", str(tmp_path / "found"))
    assert load_config(None, []).generate.selection_file == ""


def test_whole_numbers_are_taken_for_seconds() -> None:
    assert load_config(None, ["supervision.dead_after_s=9"]).supervision.dead_after_s == 9.0


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        ("prefill.num_rank=3", "prefill.num_rank is not a key: use one of num_groups, num_ranks"),
        ("nothing.num_rank=3", "nothing is not a key: use one of name"),
        ("prefill=3", "prefill = 3 is wrong: prefill is a section"),
        ("name.part=x", "name = {'part': 'x'} is wrong: input should be a valid string"),
        ("prefill.num_ranks=two", "prefill.num_ranks = 'two' is wrong: input should be a valid integer"),
        ("prefill.num_ranks=2.0", "prefill.num_ranks = 2.0 is wrong: input should be a valid integer"),
        ("generate.num_slots=true", "generate.num_slots = True is wrong: input should be a valid integer"),
        ("generate.num_slots=0", "generate.num_slots = 0 is wrong: input should be greater than or equal to 1"),
        ("generate.residency=h2o", "'h2o' is unknown: use one of device, host, infinigen, infinigen_int4, int4"),
        ("generate.residency=oracle", "generate.residency: 'oracle' is unknown: use one of device, host, infinigen, "),
        ("generate.residency=window", "generate.residency: 'window' is unknown: use one of device, host, infinigen, "),
        ("generate.speculation=quest", "generate.speculation = 'quest' is wrong: input should be 'off', 'auto', "),
        ("generate.speculation=topk", "generate.speculation = 'topk' is wrong: input should be 'off', 'auto', "),
        ("generate.residency=disk", "generate.residency: 'disk' is unknown: use one of device, host, infinigen, "),
        ("generate.pool_tokens=-1", "generate.pool_tokens = -1 is wrong: input should be greater than or equal to 0"),
        ("generate.pool_tokens=99", "pool_tokens = 99 means nothing to residency device: use 0, or infinigen"),
        ("orchestrator.port=70000", "orchestrator.port = 70000 is wrong: input should be less than or equal to 65535"),
        ("model.dtype=fp8", "model.dtype = 'fp8' is wrong: input should be 'bfloat16' or 'float32'"),
        ("name=a b", "name = 'a b' is wrong"),
        ("autoscaling.min=1", "autoscaling: min = 1 is out of range: use 0, or 2 to max = 8"),
        ("supervision.dead_after_s=0.5", "supervision: dead_after_s = 0.5 is out of range: use more than heartbeat_s"),
        ("supervision.heartbeat_s=nan", "supervision.heartbeat_s = nan is wrong"),
        ("prefill.cores=[[0]]", "prefill: cores has 1 lists: give one for each of the 2 ranks, or none"),
        ("prefill.cores=[[0],[]]", "prefill: cores has an empty list"),
        ("generate.cores=[[-1]]", "generate.cores.0.0 = -1 is wrong"),
        ("no assignment", "--set 'no assignment' is not an assignment: write it as section.field=value"),
        (".a=1", "is not an assignment"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(assignment: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [assignment])
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [(b"a = = 1", "is not TOML"), (b'a = "\xff"', "is not UTF-8 (byte 5)")],
)
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="config file .*cluster.toml") as caught:
        load_config(path)
    assert text in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml cannot be read \(No such file"):
        load_config(tmp_path / "absent.toml")


def test_the_printed_configuration_is_read_back_as_it_was(tmp_path: Path) -> None:
    assignments = ["prefill.cores=[[0],[1, 2]]", "model.cache=/a b", "supervision.heartbeat_s=0.25", "ray.address=h:1"]
    config = load_config(None, assignments)
    path = tmp_path / "printed.toml"
    path.write_text(format_config(config))
    assert load_config(path) == config


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_every_value_is_described_in_one_line(section: type[Any]) -> None:
    values = {field.name for field in fields(section) if field.type not in sections()}
    assert values
    assert all(meaning_of(section, name) and "\n" not in meaning_of(section, name) for name in values)


def test_each_worker_is_told_its_own_cores() -> None:
    config = load_config(None, ["prefill.num_groups=2", "prefill.cores=[[0],[1],[2],[3]]", "generate.cores=[[4, 5]]"])
    workers = partial(config.workers, place=WorkerPlace(model_folder=Path("model"), secret=SECRET.text))
    assert [worker.place.cores for worker in workers("prefill-1")] == [(2,), (3,)]
    assert [worker.place.cores for worker in workers("generate-0")] == [(4, 5)]
    assert [worker.name for worker in workers("prefill-1")] == ["prefill-1.0", "prefill-1.1"]
    stands_in = workers("prefill-4")
    assert [(worker.group, worker.place.cores) for worker in stands_in] == [(4, (0,)), (4, (1,))]


def test_a_relay_on_one_machine_prefills_by_its_chain_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('name = "mine"\n[orchestrator]\nmax_attempts = 2\n[generate]\nnum_slots = 4\n')
    config = read_config(path, ["prefill.num_ranks=3"]).local.config
    assert (config.orchestrator.disaggregation, config.orchestrator.max_attempts) == ("always", 2)
    assert (config.prefill.num_ranks, config.generate.num_slots) == (3, 4)
    assert config.name == f"local-{os.getpid()}"
    assert read_config(None, ["orchestrator.disaggregation=auto"]).local.config.orchestrator.disaggregation == "auto"
    with pytest.raises(ConfigError, match="orchestrator = 3 is wrong: orchestrator is a section"):
        _ = read_config(None, ["orchestrator=3"]).local.config


TENANTS = """
[orchestrator]
trust_tenant_metadata = true

[orchestrator.tenants.acme]
weight = 3
max_queued_requests = 4
api_keys = ["env:ACME_KEY", "sha256:%s"]

[orchestrator.tenants.other]
max_running = 2
"""


def test_tenants_are_read_and_their_keys_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_KEY", "k-1")
    path = tmp_path / "cluster.toml"
    path.write_text(TENANTS % hash_key("k-2"))
    config = load_config(path, ["orchestrator.tenants.other.weight=0.5"])
    tenants = config.orchestrator.tenancy()
    acme = Tenant("acme", weight=3.0, max_queued_requests=4, key_hashes=(hash_key("k-1"), hash_key("k-2")))
    assert [tenants.of((("x-api-key", key),)) for key in ("k-1", "k-2")] == [acme, acme]
    assert tenants.of((("baton-tenant", "other"),)) == Tenant("other", weight=0.5, max_running=2)
    monkeypatch.delenv("ACME_KEY")
    printed = format_config(config)
    assert "k-1" not in printed
    path.write_text(printed)  # reads no variable: the hash was printed
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        ("tenants.acme.wieght=3", "orchestrator.tenants.acme.wieght is not a key: use one of api_keys, weight, max_"),
        ("tenants.acme.weight=0", "orchestrator.tenants.acme.weight = 0 is wrong: input should be greater"),
        ("tenants.acme=3", "orchestrator.tenants.acme = 3 is wrong: orchestrator.tenants.acme is a section"),
        ('tenants.acme.api_keys=["s3cret"]', "acme.api_keys.0: is not a key reference: write env:NAME, or sha256: and"),
        ('tenants.acme.api_keys=["sha256:ab"]', "acme.api_keys.0: is not a key reference: write env:NAME, or sha256:"),
        (
            'tenants.acme.api_keys=["env:BATON_NO_SUCH_KEY"]',
            "acme.api_keys.0: environment variable BATON_NO_SUCH_KEY is not set: export it",
        ),
        ("require_api_key=true", "orchestrator: require_api_key = True, and no tenant has a key"),
    ],
)
def test_a_mistake_about_tenants_is_one_line_that_shows_no_key(assignment: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"orchestrator.{assignment}"])
    assert text in str(caught.value)
    assert "\n" not in str(caught.value) and "s3cret" not in str(caught.value)


def test_operators_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPERATOR_KEY", "o-1")
    config = load_config(None, [f'orchestrator.operator_keys=["env:OPERATOR_KEY", "sha256:{hash_key("o-2")}"]'])
    tenants = config.orchestrator.tenancy()
    assert [tenants.is_operator((("x-api-key", key),)) for key in ("o-1", "o-2")] == [True, True]
    assert "o-1" not in format_config(config)


def test_models_are_found_beside_the_served_one_unless_folders_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Path("/models/one")
    section = load_config(None).orchestrator
    assert section.folders_of_models(served, Path("/cache")) == (Path("/models"), Path("/cache"))
    assert section.folders_of_models(served, Path("/models")) == (Path("/models"),)
    assert section.folders_of_models(Path("/model"), Path("/cache")) == (Path("/model"), Path("/cache"))
    monkeypatch.chdir(tmp_path)
    named = load_config(None, ['orchestrator.model_folders=["/a", "b"]']).orchestrator
    assert named.folders_of_models(served, Path("/cache")) == (Path("/a"), tmp_path / "b")


def test_the_documented_tenants_are_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "tenants.md").read_text()
    monkeypatch.setenv("ACME_KEY", "k-1")
    monkeypatch.setenv("OPERATOR_KEY", "o-1")
    path = tmp_path / "cluster.toml"
    path.write_text(page.split("```toml")[1].split("```")[0])
    tenants = load_config(path).orchestrator.tenancy()
    assert [tenants.of((("x-api-key", key),)).name for key in ("k-1", "secret")] == ["acme", "acme"]


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (("autoscaling.max=2", "generate.num_groups=2"), "autoscaling.max = 2 is below the 3 groups configured"),
        (("prefill.num_groups=0",), "autoscaling needs a prefill group to begin with: set prefill.num_groups"),
    ],
)
@pytest.mark.parametrize("mode", ["advise", "act"])
def test_what_the_autoscaler_could_not_hold_is_refused(settings: tuple[str, ...], refusal: str, mode: str) -> None:
    load_config(None, settings)
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        load_config(None, (f"autoscaling.mode={mode}", *settings))
