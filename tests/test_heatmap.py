"""Where an error is: by position and head, from the artifact's own context."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import onnx
import pytest
from foreign_files import edited
from onnx import numpy_helper

from mha_deploy.errors import InputError, MissingError
from mha_deploy.foreign import verify_file
from mha_deploy.verification import verify
from mha_deploy.verification.context_value import arrangements, expose_context
from mha_deploy.verification.heatmap import Chosen
from mha_deploy.verification.picture import draw

HEAD, HEADS, WIDTH = 2, 4, 32


@pytest.fixture(scope="module")
def canonical(small_bundle):
    return small_bundle.artifact().path(small_bundle.folder)


def broken(bundle, path, projection, rows):
    """The bundle's graph with rows of a projection's weight doubled, whichever way it is stored."""
    model = onnx.load(bundle.artifact().path(bundle.folder))
    right = bundle.reference().get_submodule(projection).weight.detach().numpy()
    wrong = right.copy()
    wrong[rows] *= 2
    for tensor in model.graph.initializer:
        stored = numpy_helper.to_array(tensor)
        for before, after in ((right, wrong), (right.T, wrong.T)):
            if np.array_equal(stored, before):
                tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(after), tensor.name))
    onnx.save(model, path)
    return path


def mapped(bundle, path, case="odd", **options):
    chosen = Chosen(case)
    verify_file(bundle, path, names=[case], observe=chosen.see, **options)
    return chosen.make()


def test_an_error_in_one_head_shows_in_its_column_alone(small_bundle, tmp_path):
    wide = WIDTH // HEADS
    path = broken(small_bundle, tmp_path / "broken.onnx", "value", slice(HEAD * wide, (HEAD + 1) * wide))
    found = mapped(small_bundle, path)
    assert (found.axis, found.labels) == ("head", ("0", "1", "2", "3"))
    assert found.worst[1] == HEAD
    over = (found.error > found.allowed).any(axis=0)
    assert over.tolist() == [False, False, True, False]


def test_padding_is_blank_and_what_is_not_finite_is_infinite(canonical, small_bundle, tmp_path):
    found = mapped(small_bundle, canonical, "ragged-padding")
    assert np.isnan(found.error).any() or found.sample == 3
    assert found.max_error <= found.allowed
    model = onnx.load(canonical)
    (guard,) = (node for node in model.graph.node if node.op_type == "Where" and "x" in node.input)
    for node in model.graph.node:
        if node is not guard:
            node.input[:] = ["x" if name == guard.output[0] else name for name in node.input]
    onnx.save(model, tmp_path / "unguarded.onnx")
    leaky = mapped(small_bundle, tmp_path / "unguarded.onnx", "padding-garbage")
    assert np.isinf(leaky.error).any()


def test_a_context_that_the_output_does_not_follow_from_gives_way_to_features(small_bundle, tmp_path):
    path = broken(small_bundle, tmp_path / "projection.onnx", "output", slice(None))
    found = mapped(small_bundle, path)
    assert found.axis == "output features"
    assert "does not follow from the file's context" in found.why
    assert found.labels == ("0-7", "8-15", "16-23", "24-31")


def test_a_file_that_folds_batch_and_position_is_put_back(canonical, tmp_path):
    context = np.arange(3 * 5 * 2).reshape(3, 5, 2)
    for held in (context.reshape(15, 2), context.swapaxes(0, 1).reshape(15, 2)):
        assert any(np.array_equal(each, context) for each in arrangements(held, 3, 5))
    assert list(arrangements(context, 4, 5)) == []
    assert expose_context(canonical, tmp_path / "none.onnx", "y", (WIDTH + 1, WIDTH)) == ""
    assert not (tmp_path / "none.onnx").exists()


def test_without_a_name_the_worst_case_is_drawn(small_bundle):
    chosen = Chosen()
    report = verify(small_bundle, names=("odd", "sharp-softmax"), observe=chosen.see)
    worst = max(report.cases, key=lambda case: case.needed)
    assert chosen.make().case == worst.name
    unknown = Chosen("absent")
    unknown.see(report.cases[0], chosen.make)
    with pytest.raises(InputError, match="no case 'absent' to draw a heat map of; cases: odd"):
        unknown.make()


def test_a_case_that_will_not_be_run_is_refused_before_any_is(canonical, small_bundle, tmp_path, cli):
    seen, absent = [], Chosen("absent")
    note = lambda *shown: seen.append(shown)  # noqa: E731
    for run in (partial(verify, small_bundle), partial(verify_file, small_bundle, canonical)):
        with pytest.raises(InputError, match="no case 'absent' to draw a heat map of; cases: odd"):
            run(names=["odd"], observe=note, planned=absent.check)
    out = tmp_path / "map.png"
    result = cli("verify", small_bundle.folder, "--heat-map", out, "--heat-map-case", "absent")
    assert (result.exit_code, result.stderr.count("\n"), result.stdout) == (2, 1, "")
    assert "no case 'absent' to draw a heat map of; cases: ragged-padding, padding-right, " in result.stderr
    assert seen == []


def test_the_picture_is_drawn_whole_and_with_nothing_to_warn_of(canonical, small_bundle, tmp_path, cli):
    from matplotlib.image import imread

    path, out = tmp_path / "foreign.onnx", tmp_path / "map.png"
    arguments = ("--onnx", edited(canonical, path, mask="ignore"), "--dim", "seq=1:4:9", "--heat-map", out)
    result = cli("verify", small_bundle.folder, *arguments, "--case", "odd", "--heat-map-case", "odd")
    assert result.exit_code == 1
    pixels = imread(out)
    assert pixels.shape[0] > 1000
    assert pixels[..., :3].std() > 0.1


def test_without_matplotlib_one_line_says_how_to_get_it(monkeypatch, small_bundle, cli, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = cli("verify", small_bundle.folder, "--heat-map", tmp_path / "map.png")
    assert result.exit_code == MissingError.exit_code
    assert "pip install 'mha-deploy[pictures]'" in result.stderr


def test_what_is_drawn_shows_columns_of_features_too(small_bundle, tmp_path):
    path = broken(small_bundle, tmp_path / "projection.onnx", "output", slice(None))
    draw(mapped(small_bundle, path), tmp_path / "features.png")
    assert (tmp_path / "features.png").stat().st_size > 10_000


def test_a_case_to_draw_without_a_file_to_draw_it_to_is_refused(small_bundle, cli):
    result = cli("verify", small_bundle.folder, "--heat-map-case", "odd")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "--heat-map-case names the case that --heat-map draws; give both" in result.stderr
