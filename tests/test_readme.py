"""The README says what is so: its example runs, and its commands and links exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import ckptlib
from catalog import Catalog
from catalog.cli.main import app

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_example_trains_saves_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    Catalog(create=True).close()

    def run(iterations: int) -> dict[str, object]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)

        def train_step() -> float:
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss.item()

        names: dict[str, object] = {**locals()}
        exec(compile(example, str(README), "exec"), names)
        return names

    run(200)
    assert sorted(path.name for path in Path("runs/gpt").glob("iter_*")) == ["iter_0000100", "iter_0000200"]
    with Catalog() as catalog:
        assert [row.iteration for row in catalog.checkpoints("gpt")] == [100, 200]
    assert ckptlib.verify("runs/gpt/iter_0000200").ok

    # Nobody has verified anything yet, so the catalog has no resume point, and the run must not start afresh.
    with pytest.raises(ckptlib.errors.NoResumePointError):
        run(201)
    subprocess.run([Path(sys.executable).with_name("ckpt"), "verify", "gpt@200"], check=True, capture_output=True)
    resumed = run(201)["restored"]
    assert isinstance(resumed, ckptlib.Restored)
    assert resumed.iteration == 200


def test_the_readme_names_verbs_that_exist() -> None:
    verbs = re.findall(r"^    ckpt ((?:[a-z]+ )+)", README.read_text(), flags=re.MULTILINE)
    assert len(verbs) >= 8
    answers = {verb: CliRunner().invoke(app, [*verb.split(), "--help"]) for verb in verbs}
    assert {verb: answer.output for verb, answer in answers.items() if answer.exit_code != 0} == {}


def test_the_readme_links_to_files_that_exist() -> None:
    links = re.findall(r"\]\((?!http)([^)]+)\)", README.read_text())
    assert len(links) >= 4
    assert [link for link in links if not (README.parent / link).exists()] == []
