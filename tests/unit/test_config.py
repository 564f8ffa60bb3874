# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from ddtree_overlay.config import Deploy, Health, Host, load_config, parse_config
from ddtree_overlay.config_keys import HOST_KEYS
from ddtree_overlay.errors import ConfigError


FILE = Path("deploy.toml")
PROJECT = Path(__file__).parents[2]


def refusal(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, FILE)
    assert caught.value.exit_code == 2
    assert caught.value.next_step
    return caught.value


def test_every_host_field_can_be_configured_except_name_and_root():
    """A field that is added to Host must be added to the known keys as well."""
    assert {f.name for f in fields(Host)} - {"name", "root"} == set(HOST_KEYS)


def test_host_inherits_defaults_and_its_own_value_wins():
    """[defaults] is merged below each host; the address falls back to the table's name."""
    deploy = parse_config(
        '[defaults]\npython = "/opt/py"\ntimeout = 9\n[hosts.a]\n[hosts.b]\naddress = "10.0.0.2"\npython = "/b/py"\n',
        FILE,
    )

    assert deploy.host("a") == Host("a", "a", python="/opt/py", timeout=9.0)
    assert deploy.host("b") == Host("b", "10.0.0.2", python="/b/py", timeout=9.0)


def test_unknown_host_suggests_close_names():
    """An unknown host names the known ones, and the likely one first."""
    with pytest.raises(ConfigError, match=r"unknown host 'ct20' \(did you mean 'ct200'\?\)") as caught:
        parse_config("[hosts.ct200]\n", FILE).host("ct20")

    assert "ct200" in caught.value.why


def test_host_and_group_are_told_apart():
    """Who mixes the two up is told which option takes the name."""
    deploy = parse_config('[hosts.ct200]\n[groups]\ngpu = ["ct200"]\n', FILE)
    for ask, name, step in ((deploy.host, "gpu", "use --group gpu"), (deploy.group, "ct200", "use --host ct200")):
        with pytest.raises(ConfigError, match=", not a ") as caught:
            ask(name)
        assert caught.value.next_step == step


def test_unknown_host_without_any_configuration_says_so():
    """With no deploy.toml the way out is to write one."""
    with pytest.raises(ConfigError, match=r"no deploy\.toml was found") as caught:
        Deploy().host("ct200")

    assert "[hosts.ct200]" in caught.value.next_step


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[hosts.ct200]\nprot = 22\n", r"unknown key 'prot' in \[hosts\.ct200\] \(did you mean 'port'\?\)"),
        ('[defaults]\npyton = "x"\n', r"unknown key 'pyton' in \[defaults\] \(did you mean 'python'\?\)"),
        ("[host.ct200]\n", r"unknown key 'host' in the top level \(did you mean 'hosts'\?\)"),
        ('[hosts.ct200]\nroot = "/x"\n', "unknown key 'root'"),
    ],
)
def test_unknown_key_is_refused_with_a_suggestion(text, message):
    """A typing mistake in a key is an error, never ignored."""
    assert re.search(message, refusal(text).what)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[hosts.a]\nport = "22"\n', "'port' in [hosts.a] must be int, not str"),
        ("[hosts.a]\nport = true\n", "must be int, not bool"),
        ("[hosts.a]\nport = 70000\n", "must be between 1 and 65535"),
        ("[hosts.a]\ntimeout = 0\n", "must be a positive number of seconds"),
        ('[hosts.a]\ntransport = "sssh"\n', "did you mean 'ssh'?"),
        ('[hosts.a]\nuser = " "\n', "must not be empty"),
        ('[hosts.a]\nhost_key_fingerprint = "MD5:1"\n', "must look like SHA256:"),
        ('[hosts.a]\nexec_prefix = "docker \\"exec"\n', "cannot be split into words: No closing quotation"),
        ("[hosts.a]\nexec_prefix = ['sudo', 1]\n", "must hold words only"),
        ("[hosts.a]\nexec_prefix = ['sudo', '']\n", "must hold words only"),
        ("[hosts.a]\nexec_prefix = 3\n", "must be str or list, not int"),
        ("hosts = 1\n", "[hosts] must be a table"),
        ('[hosts."../x"]\n', "a host name may hold letters"),
        ('[hosts."sglang-0.5.11"]\n', "what the snapshot of a published release is called"),
        ('[hosts.a]\n[groups]\ng = ["b"]\n', "names the unknown host 'b'"),
        ('[groups]\ng = "a"\n', "must be a list of host names"),
    ],
)
def test_bad_value_is_refused_and_named(text, message):
    """A value of the wrong type or range names its key and table."""
    assert message in refusal(text).what


@pytest.mark.parametrize(
    ("text", "line"), [("[hosts.a\nport = 1\n", 1), ("[hosts.a]\nport = \n", 2), ("a = '''\n\n", 2)]
)
def test_broken_toml_names_file_and_line(text, line):
    """The position is in the first line of the message, as compilers print it."""
    assert refusal(text).what == f"deploy.toml:{line}: broken TOML"


def test_missing_file_is_refused_with_next_step(tmp_path):
    """A file that was named with --config must exist."""
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml"):
        load_config(tmp_path / "none.toml")


def test_example_configuration_loads_and_holds_ct200():
    """The deploy.toml of the project is valid."""
    assert load_config(PROJECT / "deploy.toml").host("ct200").transport == "ssh"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"docker exec -i web"', ("docker", "exec", "-i", "web")),
        ("""'env "A=b c" $X *'""", ("env", "A=b c", "$X", "*")),
        ('["sh", "-c", "exec \\"$@\\"", "x y"]', ("sh", "-c", 'exec "$@"', "x y")),
        ('""', ()),
        ("[]", ()),
    ],
)
def test_exec_prefix_is_words(text, words):
    """A line is split as a shell would without expanding it, a list is taken as it is; an empty one means none."""
    deploy = parse_config(
        f'[defaults]\nexec_prefix = "sudo -n"\n[hosts.a]\nexec_prefix = {text}\n', Path("deploy.toml")
    )
    assert deploy.host("a").exec_prefix == words


def test_restart_and_health_are_read_and_merged_with_the_defaults():
    """A host's own way to restart replaces the inherited one; the tables of `health` are merged key by key."""
    deploy = parse_config(
        '[defaults]\nrestart_unit = "sglang.service"\n[defaults.health]\nurl = "http://127.0.0.1:30000"\ntimeout = 9\n'
        "[hosts.a]\nrestart_timeout = 7\n"
        "[hosts.b]\nrestart = \"docker restart 'my web'\"\nhealth = {timeout = 2}\n"
        '[hosts.c]\nrestart = ["sh", "-c", "kill $(cat pid)"]\nhealth = {url = "https://[::1]:8443/base"}\n',
        FILE,
    )

    a, b, c = (deploy.host(name) for name in "abc")
    assert (a.restart, a.restart_unit, a.restart_timeout) == ((), "sglang.service", 7.0)
    assert (b.restart, b.restart_unit) == (("docker", "restart", "my web"), None)
    assert c.restart == ("sh", "-c", "kill $(cat pid)")
    assert [h.health for h in (a, b, c)] == [
        Health("http://127.0.0.1:30000", 9.0),
        Health("http://127.0.0.1:30000", 2.0),
        Health("https://[::1]:8443/base", 9.0),
    ]


def test_default_health_timeout_alone_gives_no_host_a_health_check():
    """[defaults.health] may hold a timeout without a URL; only a host that has `health` itself must name one."""
    assert parse_config("[defaults.health]\ntimeout = 9\n[hosts.a]\n", FILE).host("a").health is None
    assert "[hosts.a.health] has no url" in str(refusal("[hosts.a.health]\ntimeout = 9\n"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('restart = ""', "must name a program"),
        ("restart = []", "must name a program"),
        ('restart = "sh -c \'a"', "cannot be split into words"),
        ("restart = 3", "'restart' in [hosts.a] must be str or list, not int"),
        ('restart = "a"\nrestart_unit = "b.service"', "has both 'restart' and 'restart_unit'"),
        ('restart_unit = "--now"', "must be the name of one systemd unit"),
        ('restart_unit = "a b"', "must be the name of one systemd unit"),
        ("restart_timeout = 0", "must be a positive number of seconds"),
        ("restart_timeuot = 3", "did you mean 'restart_timeout'"),
        ('health = "http://x"', "'health' in [hosts.a] must be a table, not str"),
        ('health = {url = "127.0.0.1:30000"}', "must look like http://127.0.0.1:30000"),
        ('health = {url = "http://x:port"}', "must look like http://127.0.0.1:30000"),
        ('health = {urll = "http://x"}', "unknown key 'urll' in [hosts.a.health] (did you mean 'url'?)"),
        ('health = {url = "http://x", timeout = nan}', "must be a positive number of seconds"),
        ('health = {url = "http://x", api_key_file = "key"}', "must be an absolute path on the host"),
    ],
)
def test_bad_restart_or_health_is_refused(line, message):
    """What cannot restart or be asked is refused when the file is read, before anything is connected to."""
    assert message in str(refusal(f"[hosts.a]\n{line}\n"))


def test_byte_order_mark_is_no_part_of_the_configuration(tmp_path):
    """What an editor of another system puts in front does not make the first line invalid."""
    path = tmp_path / "deploy.toml"
    path.write_bytes(b'\xef\xbb\xbf[hosts.ct200]\npython = "/opt/py"\n')

    assert load_config(path).host("ct200").python == "/opt/py"
