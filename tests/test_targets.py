"""What a path to write to leads to: links, permissions, and what is no file and stays in its place."""

import contextlib
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import mha_deploy
from mha_deploy.errors import BundleError
from mha_deploy.manifest import Manifest
from mha_deploy.staging import staged_file
from mha_deploy.targets import check_target

ROOT = Path(mha_deploy.__file__).parents[1]
has_descriptors = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc")


def write(target, text="new"):
    with staged_file(target) as path:
        assert path.suffix.startswith(target.suffix)
        path.write_text(text)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def fifo(tmp_path):
    """A pipe with a name, and a function that returns all that was written to it."""
    path, read = tmp_path / "pipe.npz", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()), daemon=True)
    reader.start()

    def everything():
        reader.join(30)
        return read[0]

    yield path, everything
    with contextlib.suppress(OSError):  # lets a reader go that nobody wrote for
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


def stopped_halfway(target):
    with staged_file(target) as path:
        path.write_text("half")
        raise ValueError


@pytest.mark.parametrize("bits", [0o600, 0o640, 0o444])
def test_a_file_keeps_its_permissions(tmp_path, bits):
    target = tmp_path / "y.json"
    target.write_text("old")
    target.chmod(bits)
    write(target)
    assert (target.read_text(), mode(target)) == ("new", bits)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_answers_keep_the_permissions_of_the_file_that_they_replace(cli, small_bundle, tmp_path, suffix):
    inputs, out = tmp_path / "in.npz", tmp_path / f"y{suffix}"
    np.savez(inputs, x=np.zeros((1, 4, 32), np.float32), mask=np.ones((1, 4), bool))
    out.touch(0o600)
    assert cli("infer", small_bundle.folder, inputs, "-o", out).exit_code == 0
    assert mode(out) == 0o600
    assert out.stat().st_size > 0


def test_a_new_file_gets_the_usual_permissions(tmp_path):
    write(tmp_path / "staged")
    (tmp_path / "plain").touch()
    assert mode(tmp_path / "staged") == mode(tmp_path / "plain")


@pytest.mark.parametrize("through", ["../data/y", "middle.json"], ids=["one link", "two"])
@pytest.mark.parametrize("there", [True, False], ids=["a file", "nothing yet"])
def test_a_link_stays_and_the_file_that_it_names_is_replaced(tmp_path, through, there):
    links, data = tmp_path / "links", tmp_path / "data"
    links.mkdir()
    data.mkdir()
    (links / "middle.json").symlink_to("../data/y")
    (links / "link.json").symlink_to(through)
    if there:
        (data / "y").write_text("old")
        old = (data / "y").stat().st_ino
    write(links / "link.json")
    assert (links / "link.json").readlink() == Path(through)
    assert [path.name for path in data.iterdir()] == ["y"]
    assert (data / "y").read_text() == "new"
    assert not there or (data / "y").stat().st_ino != old


def test_the_file_behind_a_link_is_untouched_after_an_exception(tmp_path):
    (tmp_path / "y.json").write_text("old")
    (tmp_path / "link.json").symlink_to("y.json")
    with pytest.raises(ValueError, match=r"^$"):
        stopped_halfway(tmp_path / "link.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "y.json"]
    assert (tmp_path / "link.json").read_text() == "old"


def test_a_link_into_a_folder_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "link.json").symlink_to("mistyped/y.json")
    said = f"cannot write {tmp_path / 'link.json'}: there is no folder {tmp_path / 'mistyped'}"
    with pytest.raises(BundleError, match=f"^{re.escape(said)}$"):
        check_target(tmp_path / "link.json")


def test_links_in_a_circle_are_refused(tmp_path):
    (tmp_path / "one.json").symlink_to("other.json")
    (tmp_path / "other.json").symlink_to("one.json")
    with pytest.raises(BundleError, match=r"cannot write .*one\.json: Too many levels of symbolic links"):
        check_target(tmp_path / "one.json")


def test_a_pipe_with_a_name_is_written_into(fifo):
    path, everything = fifo
    write(path, "into the pipe")
    assert everything() == b"into the pipe"
    assert path.is_fifo()
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_answers_go_into_a_pipe_whole(cli, small_bundle, fifo, tmp_path_factory):
    path, everything = fifo
    inputs, kept = (tmp_path_factory.mktemp("files") / name for name in ("in.npz", "y.npz"))
    np.savez(inputs, x=np.zeros((1, 4, 32), np.float32), mask=np.ones((1, 4), bool))
    assert cli("infer", small_bundle.folder, inputs, "-o", path).exit_code == 0
    kept.write_bytes(everything())
    assert np.load(kept)["y"].shape == (1, 4, 32)
    assert path.is_fifo()


def test_nothing_goes_into_a_pipe_before_it_is_whole(fifo):
    path, everything = fifo
    with pytest.raises(ValueError, match=r"^$"):
        stopped_halfway(path)
    write(path, "whole")
    assert everything() == b"whole"


def test_a_terminal_is_written_into():
    main, side = os.openpty()
    name = Path(os.ttyname(side))
    try:
        write(name, "seen")
        assert os.read(main, 100) == b"seen"
        assert name.is_char_device()
    finally:
        os.close(main)
        os.close(side)


def test_a_device_stays_one_behind_a_link_too(tmp_path):
    device, link = tmp_path / "null", tmp_path / "link.json"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        device.write_text("")  # a file system may be mounted without devices
    except OSError as error:
        pytest.skip(f"no devices are made here: {error}")
    link.symlink_to(device)
    write(device)
    write(link)
    assert device.is_char_device()
    assert link.is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_socket_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("s.json")
        said = r"^cannot write s\.json: it is a socket; expected a file, a pipe or a terminal$"
        with pytest.raises(BundleError, match=said):
            check_target(Path("s.json"))


def test_a_block_device_is_refused_before_any_work(tmp_path):
    device = tmp_path / "disk"
    try:
        os.mknod(device, 0o600 | stat.S_IFBLK, os.makedev(0, 0))  # nobody's
    except OSError as error:
        pytest.skip(f"no devices are made here: {error}")
    with pytest.raises(BundleError, match="it is a block device; expected a file, a pipe or a terminal"):
        check_target(device)


@has_descriptors
@pytest.mark.parametrize("folder", ["/dev/fd", "/proc/self/fd"])
def test_an_open_pipe_is_written_into_as_a_shell_passes_one(folder):
    read, into = os.pipe()
    try:
        write(Path(folder, str(into)), "to wc")
        assert os.read(read, 100) == b"to wc"
    finally:
        os.close(read)
        os.close(into)


@has_descriptors
def test_a_pipe_whose_reader_is_gone_is_said_so():
    read, into = os.pipe()
    os.close(read)
    try:
        with pytest.raises(BundleError, match=rf"^cannot write /proc/self/fd/{into}: Broken pipe$"):
            write(Path(f"/proc/self/fd/{into}"))
    finally:
        os.close(into)


@has_descriptors
def test_a_descriptor_that_is_not_open_is_refused_before_any_work():
    with pytest.raises(BundleError, match=r"^cannot write /proc/self/fd/9999: descriptor 9999 is not open$"):
        check_target(Path("/proc/self/fd/9999"))


@has_descriptors
def test_what_goes_to_a_file_on_stdout_stands_between_what_is_printed(tmp_path):
    code = (
        "import sys; from pathlib import Path; from mha_deploy.staging import staged_file\n"
        "print('before', flush=True)\n"
        "with staged_file(Path(sys.argv[1])) as path:\n"
        "    path.write_text('{}\\n')\n"
        "print('after')\n"
    )
    (tmp_path / "link.json").symlink_to("/proc/self/fd/1")
    with (tmp_path / "stdout").open("w") as stdout:
        command = [sys.executable, "-c", code, str(tmp_path / "link.json")]
        subprocess.run(command, cwd=ROOT, stdout=stdout, check=True)
    assert (tmp_path / "stdout").read_text() == "before\n{}\nafter\n"


def test_a_manifest_behind_a_link_is_written_where_it_lies(small_bundle, tmp_path):
    (tmp_path / "manifest.json").symlink_to("elsewhere.json")
    small_bundle.manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == small_bundle.manifest
    assert (tmp_path / "manifest.json").is_symlink()
    assert (tmp_path / "elsewhere.json").is_file()
