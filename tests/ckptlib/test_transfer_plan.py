"""What a copy would do, for any state of both places."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ckptlib.errors import CopyRefusedError
from ckptlib.manifest import Begin, FileEntry, Manifest
from ckptlib.transfer_plan import CopyPlan, RootFacts, TargetFacts, plan

PATHS = ("__0_0.x.distcp", "__1_0.x.distcp", ".ckpt/x/index", ".ckpt/x/begin.json")
sizes = st.integers(0, 3)
manifests = st.builds(
    lambda attempt, sizes: Manifest(
        Begin("x", "r", attempt, f"id{attempt}", 7, 2, "plan"),
        tuple(FileEntry(path, size, "0" * 64) for path, size in zip(PATHS, sizes, strict=True)),
        {},
    ),
    st.integers(0, 4),
    st.lists(sizes, min_size=len(PATHS), max_size=len(PATHS)),
)


source_roots = st.one_of(
    st.just(RootFacts()),
    st.builds(
        lambda numbers: RootFacts("r", "lineage", {number: f"id{number}" for number in numbers}),
        st.sets(st.integers(1, 5)),
    ),
)
target_roots = st.one_of(
    st.just(RootFacts()),
    st.builds(
        lambda run, lineage, numbers, strange: RootFacts(
            run, lineage, {number: "other" if number == strange else f"id{number}" for number in numbers}
        ),
        st.sampled_from(["r", "r", "r", "other"]),
        st.sampled_from(["lineage", "lineage", "another"]),
        st.sets(st.integers(1, 5)),
        st.sampled_from([0, 0, 0, 1, 2, 3]),
    ),
)
targets = st.builds(
    TargetFacts,
    url=st.just("there"),
    root=target_roots,
    standing=st.sampled_from(["absent", "absent", "begun", "begun", "committed", "aborted", "deleted"]),
    newer=st.sampled_from([None, None, None, "y"]),
    foreign=st.sampled_from([None, None, None, "torch_dcp"]),
    sizes=st.dictionaries(st.sampled_from([*PATHS, "extra"]), sizes),
)


def planned(manifest: Manifest, root: RootFacts, target: TargetFacts) -> CopyPlan | None:
    try:
        return plan("here", manifest, root, target)
    except CopyRefusedError:
        return None


@given(manifests, source_roots, targets)
def test_every_file_is_sent_or_there_with_its_size(manifest: Manifest, root: RootFacts, target: TargetFacts) -> None:
    found = planned(manifest, root, target)
    if found is None:
        return
    sent = {entry.path for entry in found.to_send}
    assert found.there <= {path for path, size in target.sizes.items()}
    if found.committed:
        assert not sent
        return
    assert sent | found.there == {entry.path for entry in manifest.files}
    assert not sent & found.there
    assert all(target.sizes[entry.path] == entry.size for entry in manifest.files if entry.path in found.there)


@given(manifests, source_roots, targets)
def test_a_place_never_gets_what_it_must_not(manifest: Manifest, root: RootFacts, target: TargetFacts) -> None:
    """Nothing deleted returns; what was aborted, another run, other attempts of the same number."""
    found = planned(manifest, root, target)
    if found is None:
        return
    assert target.standing not in ("deleted", "aborted")
    assert found.committed or (target.newer is None and target.foreign is None)
    assert target.root.run in (None, "r")
    known = {**target.root.attempts}
    assert not set(found.attempts) & known.keys()
    assert all(number <= manifest.begin.attempt for number in found.attempts)
    after = {**known, **{number: root.attempts[number] for number in found.attempts}}
    assert all(
        after[number] == id_
        for number, id_ in root.attempts.items()
        if number in after and number <= manifest.begin.attempt
    )


@given(manifests, source_roots, targets)
def test_what_a_plan_has_done_needs_no_second_one(manifest: Manifest, root: RootFacts, target: TargetFacts) -> None:
    found = planned(manifest, root, target)
    if found is None:
        return
    made = target.root
    if found.copy_of is not None:
        made = RootFacts(root.run, found.copy_of)
    made = replace(made, attempts={**made.attempts, **{number: root.attempts[number] for number in found.attempts}})
    whole = {**target.sizes, **{entry.path: entry.size for entry in manifest.files}}
    begun = replace(target, root=made, standing="begun", sizes=whole) if not found.committed else target
    again = plan("here", manifest, root, begun)
    assert (again.to_send, again.copy_of, again.attempts) == ((), None, ())
    done = plan("here", manifest, root, replace(begun, standing="committed"))
    assert done.committed


@given(manifests, source_roots, targets)
def test_a_plan_can_be_shown(manifest: Manifest, root: RootFacts, target: TargetFacts) -> None:
    found = planned(manifest, root, target)
    if found is None:
        return
    shown = json.loads(json.dumps(found.to_json()))
    assert sum(shown["send"].values()) == sum(entry.size for entry in found.to_send)
    assert all(path in str(found) for path in shown["send"])
