"""A benchmark that a model was trained on is told by the digest of its file."""

import hashlib
import json

from sage_unsloth.evaluation.loading import ModelSpec
from sage_unsloth.evaluation.trained_on import contamination_warnings
from sage_unsloth.problems.benchmarks import Benchmark


def run(folder, digest):
    (folder / "adapter").mkdir(parents=True)
    data = {} if digest is None else {"data": {"file": "mine.jsonl", "sha256": digest}}
    (folder / "run.json").write_text(json.dumps({"settings": {}} | data))
    return ModelSpec(name=folder.name, path="base", adapter=str(folder / "adapter"))


def benchmark(name, digest):
    return Benchmark(name=name, rows=[], provenance=[{"file": f"{name}.jsonl", "sha256": digest}])


def test_each_model_and_each_of_its_training_files_is_named(tmp_path):
    digests = [hashlib.sha256(text).hexdigest() for text in (b"one", b"two")]
    models = [run(tmp_path / "a", digests[0]), run(tmp_path / "b", digests[1])]
    models += [run(tmp_path / "old", None), ModelSpec(name="hub", path="org/model")]
    benchmarks = [benchmark("one", digests[0]), benchmark("other", "0" * 64)]
    (warning,) = contamination_warnings(models, benchmarks)
    assert warning.startswith("a was trained on one.jsonl, which is one:")


def test_benchmarks_without_a_file_are_no_ones_training_data(tmp_path):
    plain = Benchmark(name="arithmetic", rows=[], provenance=[{"split": "test", "rows": 100}])
    assert list(contamination_warnings([run(tmp_path / "a", None)], [plain])) == []
