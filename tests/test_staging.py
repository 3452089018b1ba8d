"""The old folder or the new one, never a half: after errors, signals, and the death of a process."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mha_deploy
from mha_deploy import staging
from mha_deploy.errors import BundleError
from mha_deploy.staging import staged_file, staged_folder

ROOT = Path(mha_deploy.__file__).parents[1]
# Above the largest pid that Linux hands out (2^22): nobody's.
DEAD, ALIVE = 2**22 + 1, 1
# Writes half of a new bundle, says so, and waits to be killed.
HALFWAY = """
import signal, sys
from pathlib import Path
from mha_deploy.staging import staged_folder
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs of a shell's background
with staged_folder(Path(sys.argv[1])) as folder:
    (folder / "model.onnx").write_text("half")
    print("halfway", flush=True)
    signal.pause()
"""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def filled(folder, text="old"):
    folder.mkdir()
    (folder / "manifest.json").write_text(text)
    return folder


def replaced(target, text="new"):
    with staged_folder(target) as folder:
        (folder / "manifest.json").write_text(text)


def stopped_halfway(staged, target, error):
    with staged(target) as new:
        (new / "manifest.json" if new.is_dir() else new).write_text("new")
        raise error("halfway")


def holds(target):
    assert names(target) == ["manifest.json"]
    return (target / "manifest.json").read_text()


def killed_halfway(target, number):
    process = subprocess.Popen(
        [sys.executable, "-c", HALFWAY, str(target)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "halfway\n"
        process.send_signal(number)
    return process.pid, process.returncode


def refuse_exchange(monkeypatch):
    monkeypatch.setattr(staging, "_exchange", lambda *_: False)


def test_a_new_folder_appears_with_all_its_parents(tmp_path):
    replaced(tmp_path / "a" / "b" / "bundle")
    assert holds(tmp_path / "a" / "b" / "bundle") == "new"
    assert names(tmp_path / "a" / "b") == ["bundle"]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_takes_the_place_of_the_old_one_and_leaves_nothing_beside_it(
    tmp_path, monkeypatch, exchange
):
    if not exchange:
        refuse_exchange(monkeypatch)
    target = filled(tmp_path / "bundle")
    (target / "stale.bin").write_text("of the old one only")
    replaced(target)
    assert holds(target) == "new"
    assert names(tmp_path) == ["bundle"]


def test_the_old_folder_stands_until_the_block_ends(tmp_path):
    target = filled(tmp_path / "bundle")
    with staged_folder(target) as folder:
        (folder / "manifest.json").write_text("new")
        assert holds(target) == "old"
        assert folder.parent == tmp_path  # on the same file system, so that it can be renamed
    assert holds(target) == "new"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="renameat2 is Linux's")
def test_two_folders_are_exchanged_in_one_step(tmp_path):
    one, other = filled(tmp_path / "one", "1"), filled(tmp_path / "other", "2")
    assert staging._exchange(one, other)
    assert (holds(one), holds(other)) == ("2", "1")


def test_the_exchange_is_what_replaces_a_folder(tmp_path, monkeypatch):
    target, asked = filled(tmp_path / "bundle"), []
    real = staging._exchange

    def exchange(one, other):
        asked.append(other)
        assert other.exists()
        return real(one, other)

    monkeypatch.setattr(staging, "_exchange", exchange)
    replaced(target)
    assert asked == [target]


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, BundleError])
def test_what_stood_there_is_untouched_after_an_exception(tmp_path, error, old):
    target = tmp_path / "bundle"
    if old:
        filled(target)
    with pytest.raises(error, match=r"^halfway$"):
        stopped_halfway(staged_folder, target, error)
    assert names(tmp_path) == (["bundle"] if old else [])
    assert not old or holds(target) == "old"


def test_a_termination_signal_leaves_the_old_folder_and_cleans_up(tmp_path):
    target = filled(tmp_path / "bundle")
    _, code = killed_halfway(target, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert holds(target) == "old"
    assert names(tmp_path) == ["bundle"]


def test_a_keyboard_interrupt_from_outside_leaves_the_old_folder_and_cleans_up(tmp_path):
    target = filled(tmp_path / "bundle")
    killed_halfway(target, signal.SIGINT)
    assert holds(target) == "old"
    assert names(tmp_path) == ["bundle"]


def test_a_kill_leaves_the_old_folder_and_the_next_run_removes_the_rest(tmp_path):
    target = filled(tmp_path / "bundle")
    pid, code = killed_halfway(target, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert holds(target) == "old"
    assert names(tmp_path) == [f".bundle.partial-{pid}", "bundle"]
    replaced(target)
    assert holds(target) == "new"
    assert names(tmp_path) == ["bundle"]


def test_a_leftover_under_this_very_pid_is_removed(tmp_path):
    # In a container every run may have pid 1.
    filled(tmp_path / f".bundle.partial-{os.getpid()}", "leftover")
    replaced(tmp_path / "bundle")
    assert holds(tmp_path / "bundle") == "new"
    assert names(tmp_path) == ["bundle"]


def test_the_folders_of_a_living_process_and_of_other_targets_are_left_alone(tmp_path):
    others = [f".bundle.partial-{ALIVE}", f".bundle2.partial-{DEAD}", ".bundle.partial-notes", ".bundle"]
    for name in others:
        filled(tmp_path / name)
    replaced(tmp_path / "bundle")
    assert names(tmp_path) == sorted([*others, "bundle"])


def test_leftovers_are_found_for_a_target_with_brackets_in_its_name(tmp_path):
    filled(tmp_path / f".bundle[1].partial-{DEAD}")
    replaced(tmp_path / "bundle[1]")
    assert names(tmp_path) == ["bundle[1]"]


def test_a_link_is_replaced_and_the_folder_behind_it_kept(tmp_path):
    behind = filled(tmp_path / "v1")
    (tmp_path / "current").symlink_to(behind)
    replaced(tmp_path / "current")
    assert holds(tmp_path / "current") == "new"
    assert holds(behind) == "old"


@pytest.mark.parametrize("exchange", [True, False])
def test_a_link_that_was_replaced_leaves_nothing_beside_it(tmp_path, monkeypatch, exchange):
    if not exchange:
        refuse_exchange(monkeypatch)
    (tmp_path / "current").symlink_to(filled(tmp_path / "v1"))
    replaced(tmp_path / "current")
    assert names(tmp_path) == ["current", "v1"]


def rename_that_fails_at(monkeypatch, count, error):
    calls, real = [], Path.rename

    def rename(self, target):
        calls.append(target)
        if len(calls) == count:
            raise error
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)


@pytest.mark.parametrize("count", [1, 2])
def test_without_an_exchange_a_failed_rename_brings_the_old_folder_back(tmp_path, monkeypatch, count):
    target = filled(tmp_path / "bundle")
    refuse_exchange(monkeypatch)
    rename_that_fails_at(monkeypatch, count, PermissionError(13, "Permission denied"))
    with pytest.raises(BundleError, match=r"cannot write .*bundle: Permission denied"):
        replaced(target)
    assert holds(target) == "old"
    assert names(tmp_path) == ["bundle"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_without_an_exchange_an_interrupt_between_the_renames_brings_the_old_folder_back(
    tmp_path, monkeypatch, error
):
    target = filled(tmp_path / "bundle")
    refuse_exchange(monkeypatch)
    rename_that_fails_at(monkeypatch, 2, error)
    with pytest.raises(type(error)):
        replaced(target)
    assert names(tmp_path) == ["bundle"]
    assert holds(target) == "old"


def test_the_old_folder_that_a_killed_run_had_set_aside_is_removed_by_the_next(tmp_path):
    filled(tmp_path / f".bundle.previous-{DEAD}")
    replaced(tmp_path / "bundle")
    assert names(tmp_path) == ["bundle"]


def test_the_old_folder_that_a_killed_run_had_set_aside_comes_back_where_its_place_is_empty(tmp_path):
    target = tmp_path / "bundle"
    filled(tmp_path / f".bundle.previous-{DEAD}")
    with pytest.raises(ValueError, match="halfway"):
        stopped_halfway(staged_folder, target, ValueError)
    assert names(tmp_path) == ["bundle"]
    assert holds(target) == "old"


def test_the_handler_of_the_termination_signal_is_put_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with staged_folder(tmp_path / "bundle"):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("below", ["bundle", "deeper/bundle"])
def test_a_place_below_a_file_is_refused_with_the_reason(tmp_path, below):
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        BundleError, match=rf"cannot write to {tmp_path / 'file'}.*: (Not a directory|File exists)"
    ):
        replaced(tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "x"


def test_an_error_of_the_block_without_a_number_keeps_its_words(tmp_path):
    with (
        pytest.raises(BundleError, match=r"cannot write .*bundle: the disk fell off"),
        staged_folder(tmp_path / "bundle"),
    ):
        raise OSError("the disk fell off")


def test_a_file_appears_whole_and_under_its_own_suffix_until_then(tmp_path):
    with staged_file(tmp_path / "y.npz") as path:
        assert path.suffix == ".npz"
        assert path.parent == tmp_path
        path.write_text("answers")
    assert names(tmp_path) == ["y.npz"]
    assert (tmp_path / "y.npz").read_text() == "answers"


def test_a_folder_that_is_not_there_is_told_and_not_made(tmp_path):
    words = f"there is no folder {tmp_path / 'mistyped'}"
    with pytest.raises(BundleError, match=re.escape(words)), staged_file(tmp_path / "mistyped" / "y.npz"):
        pytest.fail("nothing is to be written")
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_old_file_is_untouched_after_an_exception(tmp_path, error):
    (tmp_path / "y.npz").write_text("old")
    with pytest.raises(error):
        stopped_halfway(staged_file, tmp_path / "y.npz", error)
    assert names(tmp_path) == ["y.npz"]
    assert (tmp_path / "y.npz").read_text() == "old"


def test_a_file_does_not_take_the_place_of_a_folder(tmp_path):
    filled(tmp_path / "y.npz")
    with (
        pytest.raises(BundleError, match=r"cannot write .*y\.npz: Is a directory"),
        staged_file(tmp_path / "y.npz") as path,
    ):
        path.write_text("new")
    assert holds(tmp_path / "y.npz") == "old"


def test_a_block_that_writes_no_file_is_said_so(tmp_path):
    with (
        pytest.raises(BundleError, match=r"cannot write .*y\.npz: No such file"),
        staged_file(tmp_path / "y.npz"),
    ):
        pass


@pytest.mark.parametrize("below", ["y.npz", "deeper/y.npz"])
def test_a_file_below_a_file_is_refused_with_the_reason(tmp_path, below):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match=r"cannot write .*y\.npz: "), staged_file(tmp_path / "file" / below):
        pass


@pytest.mark.parametrize("nameless", [".", "/"])
def test_a_path_that_names_no_file_is_refused(nameless):
    with pytest.raises(BundleError, match="cannot write"), staged_file(Path(nameless)):
        pass


def test_halves_of_a_file_go_with_the_next_write_but_only_those_of_the_dead(tmp_path):
    living = [f".y.json.partial-{ALIVE}.json", f".y.json.partial-{DEAD}.txt", f".x.json.partial-{DEAD}.json"]
    others = [".y.json.partial-mine.json", "z.json"]
    for name in (f".y.json.partial-{DEAD}.json", *living, *others):
        (tmp_path / name).write_text("half")
    with staged_file(tmp_path / "y.json") as path:
        path.write_text("new")
    assert names(tmp_path) == sorted([*living, *others, "y.json"])


def test_a_write_that_is_killed_leaves_nothing_once_there_is_another(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from mha_deploy.staging import staged_file\n"
        "with staged_file(Path(sys.argv[1])) as path:\n"
        "    path.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    target = tmp_path / "search.json"
    killed = subprocess.run([sys.executable, "-c", code, str(target)], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 1
    with staged_file(target) as path:
        path.write_text("whole")
    assert names(tmp_path) == ["search.json"]
