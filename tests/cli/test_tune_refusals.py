# SPDX-License-Identifier: Apache-2.0
"""What `tune` refuses: servers, hosts and arguments that nothing can be measured with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.sshd import SshServer
from tests.support.tunable import ARMS, INFO, QUICK, SHORT, Tunable, certificate
from tests.support.waiting import HANG, no_hang


@pytest.fixture
def tunable() -> Iterator[Tunable]:
    """A server that would answer."""
    with Tunable() as server:
        yield server


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x.txt", ".png or .svg or .pdf"),
        ("none/x.png", "mkdir -p"),
        ("..", "a plot is"),
        ("/proc/x.png", "cannot be written there: No such file"),  # root may write to any folder, says its mode
    ],
)
def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_measured(run, tunable, name, says):
    """Minutes of measuring end in no surprise."""
    done = run("tune", "--url", tunable.url, "--plot", name)

    assert done.code == 2 and says in done.err and not tunable.seen


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speculative_algorithm": "DFLASH"}, "does not run DDTREE, but DFLASH"),
        ({"speculative_algorithm": None}, "no speculative decoding"),
        ({"speculative_ddtree_overlay_id": None}, "no overlay id"),
    ],
)
def test_a_server_without_this_ddtree_is_refused_and_gets_no_request(run, changes, says):
    """Exit 1 with what, why and next."""
    with Tunable(info=INFO | changes) as server:
        done = run("tune", "--url", server.url)

    assert done.code == 1 and says in done.err and "why:" in done.err and "next:" in done.err
    assert not server.seen


def test_nobody_listening_is_a_connection_failure(run):
    """Exit 8, with what to look at."""
    done = run("tune", "--url", "http://127.0.0.1:9", "--timeout", "60")

    assert done.code == 8 and "Connection refused" in done.err and "next:" in done.err


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not speak HTTP"),
        (b"", "Remote end closed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}", "cut short"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "does not answer like SGLang"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "does not answer like SGLang"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", "answers 302"),
        (b"HTTP/1.1 502 Bad\x1b[31m Gateway\r\nContent-Length: 0\r\n\r\n", "answers 502"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + b"[" * 200000, "does not answer like SGLang"),
    ],
)
def test_what_does_not_answer_like_sglang_is_refused(run, raw, says):
    """Another service, a gateway, a redirect: nothing is followed and nothing is believed."""
    with Tunable(raw=raw) as server:
        done = run("tune", "--url", server.url, "--timeout", "60")

    assert done.code in {1, 8} and says in done.err and "fault in ddtree-overlay" not in done.err
    assert "\x1b[31m" not in done.err


def test_a_certificate_that_nobody_vouches_for_is_refused(run, tmp_path):
    """TLS is verified; SSL_CERT_FILE names the authority of a server of one's own."""
    files = certificate(tmp_path)
    with Tunable(tls=files) as server:
        refused = run("tune", "--url", server.url, *SHORT)
        trusted = run("tune", "--url", server.url, *SHORT, SSL_CERT_FILE=str(files[0]))
        other = run("tune", "--url", server.url.replace("127.0.0.1", "localhost"), SSL_CERT_FILE=str(files[0]))

    assert (refused.code, trusted.code, other.code) == (8, 0, 8)
    assert "certificate is not trusted" in refused.err and "SSL_CERT_FILE" in refused.err and "https" in refused.err
    assert "localhost" in other.err


def test_the_other_scheme_is_named_where_one_end_speaks_tls_and_the_other_does_not(run, tmp_path, tunable):
    """OpenSSL's own words for it (WRONG_VERSION_NUMBER) help nobody."""
    with Tunable(tls=certificate(tmp_path)) as server:
        plain = run("tune", "--url", server.url.replace("https", "http"), "--timeout", "60")
    secure = run("tune", "--url", tunable.url.replace("http", "https"), "--timeout", "60")

    assert plain.code == 8 and "name it as https://" in plain.err
    assert secure.code == 8 and "does not speak TLS: name it as http://" in secure.err


def test_no_proxy_of_the_environment_is_used(run, tunable):
    """A server is measured, not what stands before it."""
    nowhere = dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:1")

    assert run("tune", "--url", tunable.url, *SHORT, "--arms", "7", **nowhere).code == 0


def test_an_api_key_comes_from_the_environment_and_is_printed_nowhere(run, tunable):
    """Refused without one and with a wrong one (exit 8); neither the key nor what the server says of it is shown."""
    tunable.key = "open-sesame"
    without = run("tune", "--url", tunable.url)
    unset = run("tune", "--url", tunable.url, "--api-key-env", "TUNE_KEY")
    wrong = run("tune", "--url", tunable.url, "--api-key-env", "TUNE_KEY", TUNE_KEY="guess-me")
    split = run("tune", "--url", tunable.url, "--api-key-env", "TUNE_KEY", TUNE_KEY="a\r\nX-Evil: b")
    right = run(
        *("tune", "--url", tunable.url, "--api-key-env", "TUNE_KEY", *SHORT, "-vv", "--json"), TUNE_KEY="open-sesame"
    )

    assert (without.code, wrong.code) == (8, 8) and "--api-key-env NAME" in without.err
    assert "check what the variable that --api-key-env names holds" in wrong.err
    assert unset.code == 2 and "it is not set" in unset.err
    assert split.code == 2 and "X-Evil" not in split.err
    assert right.code == 0, right
    for done in (without, unset, wrong, split, right):
        assert not any(word in done.out + done.err for word in ("open-sesame", "guess-me", "hush-hush"))


def test_a_busy_server_is_left_alone_unless_told_otherwise(run, tunable):
    """Others' requests would be measured too, and slowed down."""
    tunable.load = 3
    done = run("tune", "--url", tunable.url, *SHORT)
    assert done.code == 1 and "is busy: 3 requests" in done.err and "--anyway" in done.err and not tunable.seen

    assert run("tune", "--url", tunable.url, *SHORT, "--anyway").code == 0


def test_a_server_that_is_too_slow_is_an_error_of_each_request(run, tunable):
    """--timeout bounds a request; the run comes to an end, with a reason."""
    tunable.seconds = dict.fromkeys(ARMS, 600.0)
    with no_hang(3 * HANG):
        done = run("tune", "--url", tunable.url, *QUICK, "--timeout", "3", "--arms", "7,chain")

    assert done.code == 1 and "no answer within 3 s" in done.err


def test_too_little_time_for_anything_is_a_failure(run, tunable):
    """No empty table."""
    tunable.seconds = {"chain": 600.0}
    done = run("tune", "--url", tunable.url, "--no-plot", "--seconds", "6")

    assert done.code == 1 and "nothing was measured: the time is up" in done.err and "--seconds" in done.err


def test_a_tunnel_to_nobody_is_a_connection_failure(run, workspace, sshd: SshServer):
    """What the host says of it is passed on."""
    table = sshd.toml("gpu", "python3")
    (workspace / "deploy.toml").write_text(f'{table}\n[hosts.gpu.health]\nurl = "http://127.0.0.1:9"\n')
    done = run("tune", "--host", "gpu")

    assert done.code == 8 and "gpu cannot connect to 127.0.0.1 port 9" in done.err


@pytest.mark.usefixtures("sshd")  # where there is none, this is skipped with the others
def test_a_host_that_forwards_nothing_is_refused_with_a_way_out(run, workspace, tmp_path, tunable):
    """`AllowTcpForwarding no` is a common hardening."""
    with SshServer.start(
        tmp_path / "closed", Path(__file__).parents[2] / ".cache", options="AllowTcpForwarding no"
    ) as closed:
        table = closed.toml("gpu", "python3")
        (workspace / "deploy.toml").write_text(f'{table}\n[hosts.gpu.health]\nurl = "{tunable.url}"\n')
        done = run("tune", "--host", "gpu")

    assert done.code == 8 and "AllowTcpForwarding" in done.err and "--url" in done.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "no target was named"),
        (("--host", "ct200", "--url", "http://x:1"), "exclude each other"),
        (("--host", "ct200"), "does not say where its server listens"),
        (("--host", "ct200", "--host", "ct201"), "unknown host 'ct201'"),
        (("--url", "127.0.0.1:30000"), "must look like http://"),
        (("--url", "http://user:secret@h:1"), "must look like http://"),
        (("--url", "ftp://h:1"), "must look like http://"),
        (("--url", "http://h:99999"), "must look like http://"),
        (("--url", "http://h:1", "--concurrency", "0"), "no list of numbers"),
        (("--url", "http://h:1", "--concurrency", "1,,2"), "no list of numbers"),
        (("--url", "http://h:1", "--concurrency", "2000"), "no list of numbers"),
        (("--url", "http://h:1", "--concurrency", "٣"), "no list of numbers"),
        (("--url", "http://h:1", "--seconds", "nan"), "seconds"),
        (("--url", "http://h:1", "--temperature", "nan"), "temperature"),
        (("--url", "http://h:1", "--rounds", "0"), "--rounds"),
        (("--url", "http://h:1", "--plot", "x.png", "--no-plot"), "exclude each other"),
        (("--url", "http://h:1", "--prompts", "missing.json"), "No such file"),
        (("--url", "http://h:1", "--prompts", "."), "directory"),
        (("--url", "http://h:1", "--prompts", "deploy.toml"), "cannot be used"),
        (("--url", "http://h:1", "--api-key-env", ""), "not set"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(run, words, says):
    """Exit 2, and the message names what is wrong."""
    done = run("tune", *words)

    assert done.code == 2 and says in done.err and "secret" not in done.err


def test_two_hosts_are_not_measured_at_once(run, workspace):
    """Which of them the table is about would be a guess."""
    with (workspace / "deploy.toml").open("a") as config:
        config.write('[hosts.ct201]\naddress = "127.0.0.1"\n')
    done = run("tune", "--host", "ct200", "--host", "ct201")

    assert done.code == 2 and "one server at a time" in done.err
