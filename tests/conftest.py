"""What holds for every test: no trace of the user's own settings, deterministic examples, one torch thread."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.s3_server import S3Server, running_s3_server

# Before anything imports Prefect or torch: both read these once. Child processes inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(
    DO_NOT_TRACK="1",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    PREFECT_LOGGING_TO_API_ENABLED="false",
)

# A suite started in the background of a script inherits an ignored Ctrl-C; the tests that send one would not be heard.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The examples are the same in every run and on every machine; a slow one is no failure on a shared core.
settings.register_profile(
    "default",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
# make test-deep: new examples every time, printed in a form that repeats them.
settings.register_profile(
    "deep", settings.get_profile("default"), derandomize=False, max_examples=3000, print_blob=True
)
settings.load_profile(os.environ.get("CKPT_TEST_PROFILE", "default"))


@pytest.fixture(autouse=True)
def isolated_settings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A catalog, a Prefect home and a data directory of the test's own: never those of the user who runs it."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.delenv("CKPT_DB", raising=False)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    monkeypatch.setenv("PREFECT_HOME", str(home / "prefect"))
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "aws" / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home / "aws" / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return home


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A real S3 server, started by the first test that needs it."""
    with running_s3_server() as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server) -> Iterator[str]:
    """A bucket of the test's own. A fifth of a second; where a prefix will do, take `s3_url`."""
    with s3.bucket() as name:
        yield name


@pytest.fixture(scope="session")
def shared_bucket(s3: S3Server) -> Iterator[str]:
    """A bucket for tests that keep to a prefix of their own."""
    with s3.bucket() as name:
        yield name


@pytest.fixture
def s3_url(shared_bucket: str) -> str:
    """An empty prefix of the test's own."""
    return f"s3://{shared_bucket}/{uuid.uuid4().hex}"
