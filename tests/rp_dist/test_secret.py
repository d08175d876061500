"""A secret is found, or refused with words; nothing shows it; and the address to listen on is the chosen one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from rp_dist import InvalidSecret, InvalidTransfer
from rp_dist.links import interfaces
from rp_dist.links.secret import Secret
from rp_dist.opening.rendezvous import Rendezvous

TEXT = "a secret of many bytes"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """No secret and no interface in the environment."""
    for name in (
        "ROUNDPIPE_SECRET",
        "ROUNDPIPE_SECRET_FILE",
        "GLOO_SOCKET_IFNAME",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of a secret that only its owner may read."""
    path = tmp_path / "secret"
    path.write_text(f"{TEXT}\n")
    path.chmod(0o600)
    monkeypatch.setenv("ROUNDPIPE_SECRET_FILE", str(path))
    return path


def test_without_one_there_is_none_and_one_of_a_run_is_another_each_time() -> None:
    assert Secret.found() is None
    assert Secret.made().key != Secret.made().key


def test_a_secret_of_the_environment_and_one_of_a_file_are_the_same(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_file = Secret.found()
    monkeypatch.delenv("ROUNDPIPE_SECRET_FILE")
    monkeypatch.setenv("ROUNDPIPE_SECRET", file.read_text())

    assert Secret.found() == of_file == Secret(TEXT.encode(), is_own=True)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o666])
def test_a_file_that_others_may_use_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)

    with pytest.raises(
        InvalidSecret, match=rf"others may use \(mode 0{mode:o}\); its mode must be 0600: chmod 600 "
    ):
        Secret.found()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, 12345, -1)

    with pytest.raises(InvalidSecret, match="belongs to another user"):
        Secret.found()


def test_a_fifo_is_refused_and_not_waited_for(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)

    with pytest.raises(InvalidSecret, match="must name a regular file"):
        Secret.found()


@pytest.mark.parametrize("text", ["", "short", " " * 50, "\n"])
def test_a_secret_that_can_be_guessed_is_refused(text: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(text)

    with pytest.raises(InvalidSecret, match=r"must have 16 bytes or more, but has [05]; make one with"):
        Secret.found()
    monkeypatch.delenv("ROUNDPIPE_SECRET_FILE")
    monkeypatch.setenv("ROUNDPIPE_SECRET", text)
    with pytest.raises(InvalidSecret, match=r"must have 16 bytes or more, but has [05]; make one with"):
        Secret.found()


def test_other_mistakes_with_a_file_are_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("x" * 5000)
    with pytest.raises(InvalidSecret, match="more than 4096 bytes"):
        Secret.found()
    file.unlink()
    with pytest.raises(InvalidSecret, match="cannot be read: No such file"):
        Secret.found()
    monkeypatch.setenv("ROUNDPIPE_SECRET", TEXT)
    with pytest.raises(InvalidSecret, match="but both are set"):
        Secret.found()


def test_nothing_that_prints_a_secret_shows_it() -> None:
    secret = Secret(TEXT.encode(), is_own=False)
    card = Rendezvous(None, 4000, "ab" * 16, secret)

    for text in (repr(secret), repr(card), str(secret)):
        assert TEXT not in text
        assert TEXT.encode().hex() not in text


@pytest.mark.parametrize(
    "text",
    ["", "x", "rp-dist", "4000 abc", "rp-dist 1 - 0 " + "a" * 32 + " -", "rp-dist 1 - 99999 " + "a" * 32 + " -",
     "rp-dist 1 evil.example 4000 " + "a" * 32 + " -", "rp-dist 1 - 4000 " + "a" * 31 + " -",
     "rp-dist 1 - 4000 " + "a" * 32 + " " + "b" * 63, "rp-dist 1 - ٤٠٠٠ " + "a" * 32 + " -", "x" * 1_000_000],
)  # fmt: skip
def test_a_card_that_somebody_else_wrote_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="holds an address of rank 0 that is none"):
        Rendezvous.parsed(text)


def test_a_card_of_another_version_says_so() -> None:
    with pytest.raises(
        ValueError, match="rank 0 speaks version 7 of rp-dist's protocol, and this machine version 1"
    ):
        Rendezvous.parsed("rp-dist 7 - 4000 " + "a" * 32 + " -")


# Where to listen


def test_the_named_interface_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    assert interfaces.of_first("10.1.2.3") == interfaces.chosen() == "127.0.0.1"


def test_an_interface_that_is_not_there_is_named_beside_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")

    with pytest.raises(InvalidTransfer, match=r"of this machine \(.*lo.*\), but is 'eth99'"):
        interfaces.chosen()


def test_the_address_that_others_use_is_taken_where_it_is_of_this_machine() -> None:
    assert interfaces.of_first("127.0.0.1") == "127.0.0.1"
    assert interfaces.of_first("127.1.2.3") == "127.1.2.3"


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-name.invalid"])
def test_an_address_that_is_not_of_this_machine_means_all(host: str) -> None:
    assert interfaces.of_first(host) is None


def test_a_name_that_means_another_address_to_others_means_all(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    assert interfaces.of_first("this-machine") is None


def test_processes_that_are_all_on_one_machine_use_its_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")

    assert interfaces.of_first("192.0.2.1") == "127.0.0.1"
