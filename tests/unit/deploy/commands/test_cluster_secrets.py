"""The files in which a cluster's secrets are kept: new at each start, for one user alone, gone with the record."""

import os
import stat
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.transport.identity import ClusterSecret
from deploy.commands.cluster_secrets import keep_secrets, load_secret, remove_secrets, token_path
from deploy.commands.record import ClusterRecord, ray_token_of, record_path, secret_for
from deploy.config.environment import SECRET_VARIABLE
from tests.support.wire.secret import SECRET


@pytest.fixture
def record(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the record of a cluster named mine lies, which is not there yet."""
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    return record_path("mine")


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}


def test_secrets_are_read_back_and_are_their_user_s_alone_whatever_the_umask(record: Path) -> None:
    before = os.umask(0)
    try:
        assert keep_secrets(record, SECRET) == token_path(record)
    finally:
        os.umask(before)
    assert load_secret(record) == SECRET
    assert modes(record.with_suffix(".secrets")) == {"mine.secrets": 0o700, "cluster_secret": 0o600, "ray_token": 0o600}


def test_each_start_makes_new_ones_and_none_outlives_the_record(record: Path) -> None:
    token = keep_secrets(record, SECRET).read_text()
    other = ClusterSecret.new()
    assert keep_secrets(record, other).read_text() != token
    assert load_secret(record) == other
    ClusterRecord("mine", 1, "", "", "").save()
    ClusterRecord("mine", 1, "", "", "").remove()
    assert list(record.parent.iterdir()) == []
    remove_secrets(record)


def test_a_secret_that_others_may_have_read_is_refused(record: Path) -> None:
    path = keep_secrets(record, SECRET).with_name("cluster_secret")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="cluster_secret belongs to another user or is open to others"):
        load_secret(record)


def test_a_link_is_not_followed(record: Path, tmp_path: Path) -> None:
    path = keep_secrets(record, SECRET).with_name("cluster_secret")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_secret(record)


def test_a_folder_that_cannot_be_made_is_named(record: Path) -> None:
    record.parent.parent.mkdir(parents=True)
    record.parent.write_text("no folder")
    with pytest.raises(ConfigError, match=r"mine\.secrets cannot be made .*: remove it"):
        keep_secrets(record, SECRET)


def test_a_target_elsewhere_is_sent_the_secret_of_the_environment_alone(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_secrets(record, SECRET)
    assert secret_for(None, "mine") == SECRET
    with pytest.raises(ConfigError, match=f"environment variable {SECRET_VARIABLE} is not set"):
        secret_for("elsewhere:1", "mine")
    other = ClusterSecret.new()
    monkeypatch.setenv(SECRET_VARIABLE, other.text)
    assert secret_for("elsewhere:1", "mine") == other
    assert secret_for(None, "mine") == SECRET
    with pytest.raises(ConfigError, match="cannot be read"):
        secret_for(None, "yours")


def test_the_token_of_a_ray_that_a_cluster_of_this_user_started_is_found(record: Path) -> None:
    ClusterRecord("mine", 1, "", "h:1", "/tmp/ray-of-mine").save()
    ClusterRecord("joined", 1, "", "h:2", "").save()
    record_path("damaged").write_text("{}")
    assert ray_token_of("h:1") == token_path(record)
    assert ray_token_of("h:2") is None
