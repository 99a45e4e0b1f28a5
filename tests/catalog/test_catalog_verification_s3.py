"""What the catalog records of a verification by the store's word alone, on a real S3 server (V3)."""

from __future__ import annotations

import fsspec.config
import pytest
import torch

import ckptlib
from catalog import Catalog, Recorder, ResumeResolver
from catalog.verification import verify_leased
from ckptlib.errors import NoResumePointError
from tests.support.fault_proxy import FaultProxy
from tests.support.faults import Fault
from tests.support.s3_server import S3Server


def test_the_level_of_a_verification_is_recorded_and_a_resume_may_require_more(
    catalog: Catalog, catalog_url: str, s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    state = {"model": torch.nn.Linear(2, 2), "optimizer": {"moment": torch.ones(2)}}
    with ckptlib.Checkpointer(s3_url, run="run", listeners=[Recorder(catalog_url)]) as checkpointer:
        checkpointer.save(state, iteration=100)
    strict = ResumeResolver(catalog_url, require="data")

    (lease,) = catalog.lease_unverified(owner="w", ttl=60, level="auto")
    assert verify_leased(catalog, lease, level="auto").level == "store"
    row = catalog.checkpoint("run", 100)
    assert (row.verdict, row.verified_level) == ("verified", "store")
    choice = ResumeResolver(catalog_url).resolve(run="run", root_url=s3_url, at=None)
    assert choice is not None
    assert choice.iteration == 100
    with pytest.raises(NoResumePointError, match=r"store's digests only.*ckpt verify run --level data"):
        strict.resolve(run="run", root_url=s3_url, at=None)

    (lease,) = catalog.lease_unverified(owner="w", ttl=60, level="data")
    assert verify_leased(catalog, lease, level="data").bytes_read > 0
    assert catalog.checkpoint("run", 100).verified_level == "data"
    assert [done.level for done in catalog.verifications(row.id)] == ["store", "data"]
    assert strict.resolve(run="run", root_url=s3_url, at=None) is not None


def test_bytes_that_went_bad_in_the_store_stay_corrupt_whatever_it_vouches_for(
    catalog: Catalog, catalog_url: str, s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V3, V4: its digests are of what it was given. A copy that reads well again is verified."""
    with FaultProxy(s3) as proxy:
        monkeypatch.setitem(fsspec.config.conf, "s3", s3.storage_options(endpoint=proxy.endpoint))
        with ckptlib.Checkpointer(s3_url, run="run", listeners=[Recorder(catalog_url)]) as checkpointer:
            checkpointer.save({"model": torch.nn.Linear(64, 64)}, iteration=100)
        row = catalog.checkpoint("run", 100)

        def verified(level: str) -> tuple[str, str]:
            (lease,) = catalog.lease_unverified(owner="w", ttl=60, checkpoint_id=row.id, force=True)
            report = verify_leased(catalog, lease, level=level)
            return report.level, catalog.checkpoint_by_id(row.id).verdict

        assert verified("auto") == ("store", "verified")
        proxy.faults = [Fault("flip_download", "GetObject", "*.distcp", times=None)]
        assert verified("data") == ("data", "corrupt")
        assert verified("store") == ("store", "corrupt")
        assert verified("auto") == ("data", "corrupt")
        proxy.faults = []
        assert verified("auto") == ("data", "verified")
