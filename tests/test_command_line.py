"""How flags, environment and config file become settings."""

import string
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from xylite.command_line import human_bytes, human_int, parse
from xylite.config import EngineConfig, ServerConfig, about, checked, speculative
from xylite.errors import ConfigError
from xylite.flags import ALIASES, Command, help_text, markdown_table, settings


class Toy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field of each kind."""

    model: Annotated[str, about("The model.", "one")] = "demo"
    limit: Annotated[Annotated[int, Meta(ge=1)] | None, about("A limit; auto has none.", "one")] = (
        None
    )
    share: Annotated[float, about("A share.", "one", gt=0, le=1)] = 0.5
    fast: Annotated[bool, about("Be fast.", "two")] = True
    names: Annotated[tuple[str, ...], about("Names.", "two")] = ()
    levels: Annotated[tuple[float, ...], about("Numbers.", "two")] = (1.5,)
    colour: Annotated[Literal["red", "green"], about("A colour.", "two")] = "red"
    nested: Annotated[dict[str, Any] | None, about("JSON.", "two")] = None
    prompt: Annotated[str | None, about("A text.", "two")] = None


TOY = Command("toy", "Plays.", (Toy,), ("model", "prompt"))


def toy(*words: str, **environment: str) -> Toy:
    (result,) = parse(TOY, words, environment).structs
    return result


def refusal(*words: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as e:
        parse(TOY, words, environment)
    assert "\n" not in e.value.message
    return e.value.message


def test_dash_and_underscore_and_equals_sign_are_alike():
    serve = Command("serve", "", (EngineConfig, ServerConfig), ("model",))
    for words in (["--max-num-seqs", "3"], ["--max_num_seqs", "3"], ["--max_num-seqs=3"]):
        assert parse(serve, words, {}).structs[0] == EngineConfig(max_num_seqs=3)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--limit", "25.6k"], "limit", 25600),
        (["--limit=auto"], "limit", None),
        (["--limit", "none"], "limit", None),
        (["--share", "1"], "share", 1.0),
        (["--no-fast"], "fast", False),
        (["--fast=off"], "fast", False),
        (["--no-fast", "--fast"], "fast", True),
        (["m", "p", "--names", "a", "b,c", "--fast"], "names", ("a", "b", "c")),
        (["--names", "a", "--names=b"], "names", ("a", "b")),
        (["--levels", "1,2.5"], "levels", (1.0, 2.5)),
        (["--colour", "green"], "colour", "green"),
        (["--nested", '{"a": 1}'], "nested", {"a": 1}),
        (["--nested", "null"], "nested", None),
        (["--nested.a-b", "1", "--nested.c.d", "x"], "nested", {"a_b": 1, "c": {"d": "x"}}),
        (["--nested", '{"a": 1, "b": 2}', "--nested.a=3"], "nested", {"a": 3, "b": 2}),
        (["--nested.a+", "1", "--nested.a+", "2"], "nested", {"a": [1, 2]}),
        (["-p", "-1"], "prompt", "-1"),
        (["m", "--", "--fast"], "prompt", "--fast"),
        (["m", "-"], "prompt", "-"),
        (["--model", "m", "text"], "prompt", "text"),
    ],
)
def test_a_flag_is_read_by_the_type_of_its_field(words: list[str], field: str, value: object):
    result = getattr(toy(*words), field)
    assert (result, type(result)) == (value, type(value))


def test_a_list_does_not_swallow_the_model_that_is_still_to_come():
    result = toy("--names", "a", "my-model", "my prompt")
    assert (result.names, result.model, result.prompt) == (("a",), "my-model", "my prompt")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--limt", "1"], "unknown flag --limt; did you mean --limit?"),
        (["--qqqqqq"], "unknown flag --qqqqqq; --help lists all"),
        (["-x"], "unknown flag -x; --help lists all"),
        (["--limit"], "--limit needs a value"),
        (["--limit", "--fast"], "--limit needs a value"),
        (["--limit", "0"], "--limit: expected a whole number of at least 1, got '0'"),
        (["--limit", "1.5"], "--limit: expected a whole number, got '1.5'"),
        (["--limit", "many"], "expected a whole number such as"),
        (["--share", "nan"], "--share: expected a number above 0, at most 1, got 'nan'"),
        (["--share", "2"], "--share: expected a number above 0, at most 1, got '2'"),
        (["--colour", "blue"], "--colour: expected one of green, red, got 'blue'"),
        (["--fast=maybe"], "--fast: expected true or false, got 'maybe'"),
        (["--no-fast=1"], "--no-fast takes no value"),
        (["--no-limit"], "unknown flag --no-limit"),
        (["--nested", "{"], "--nested: expected a JSON object"),
        (["--nested", "[1]"], "--nested: expected object"),
        (["--nested.", "1"], "unknown flag --nested."),
        (["--nested.a", "1", "--nested.a.b", "2"], "--nested.a.b: a is not an object, it is 1"),
        (["--nested.a", "1", "--nested.a+", "2"], "--nested.a+: a is not a list, it is 1"),
        (["--limit.a", "1"], "unknown flag --limit.a"),
        (["--limit+", "1"], "unknown flag --limit+"),
        (["--levels", "1,x"], "--levels: "),
        (["--prompt", ""], "--prompt needs a value"),
        (["--prompt=", "--fast"], "--prompt needs a value"),
        (["--levels", " ,"], "--levels needs a value"),
        (["--limit="], "--limit needs a value"),
        (["m", "p", "q"], "'q' is one argument too many"),
        (["", "p"], "MODEL is empty"),
        (["m", ""], "PROMPT is empty"),
        (["--trust-remote-code"], "--trust-remote-code: xylite never runs code"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(words: list[str], said: str):
    assert said in refusal(*words)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("1_000", 1000),
        ("-3", -3),
        ("1k", 1000),
        ("1K", 1024),
        ("2Ki", 2048),
        ("25.6k", 25600),
        ("1.5M", 3 << 19),
        ("3g", 3 * 10**9),
        ("1Ti", 1 << 40),
        ("-0.5k", -500),
    ],
)
def test_numbers_take_units(text: str, number: int):
    assert human_int(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "1kk", "1ki", "0.0001k", "0x10", "1 2", "inf"])
def test_what_is_no_whole_number_is_refused(text: str):
    with pytest.raises(ValueError, match="whole number"):
        human_int(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("4096B", 4096),
        ("100MiB", 100 << 20),
        ("100 MiB", 100 << 20),
        (" 100mib ", 100 << 20),
        ("100Mi", 100 << 20),
        ("100mi", 100 << 20),
        ("100M", 100 << 20),
        ("100m", 100_000_000),
        ("100MB", 100_000_000),
        ("100 mb", 100_000_000),
        ("1.5GB", 1_500_000_000),
        ("0.5 KiB", 512),
        ("1TIB", 1 << 40),
        ("-1kB", -1000),
    ],
)
def test_bytes_take_units_in_full(text: str, number: int):
    assert human_bytes(text) == number


@pytest.mark.parametrize(
    "text", ["", "B", "MiB", "1 M iB", "1Mib/s", "1iB", "0.3B", "1.0001KB", "1PB", "0x10", "1e6"]
)
def test_what_is_no_number_of_bytes_is_refused(text: str):
    with pytest.raises(ValueError, match="number"):
        human_bytes(text)


def test_every_setting_in_bytes_takes_them(tmp_path: Path):
    file = tmp_path / "settings.yaml"
    file.write_text("kv-cache-memory-bytes: 2 GiB\n")
    serve = Command("serve", "", (EngineConfig, ServerConfig))
    words = ["--config", str(file), "--max-request-bytes", "1MB"]
    engine, server = parse(serve, words, {}).structs
    assert (engine.kv_cache_memory_bytes, server.max_request_bytes) == (2 << 30, 1_000_000)
    with pytest.raises(ConfigError, match="--max-request-bytes: expected a number of bytes such"):
        parse(serve, ["--max-request-bytes", "1Mbit"], {})
    with pytest.raises(ConfigError, match="--max-num-seqs: expected a whole number from 1"):
        parse(serve, ["--max-num-seqs", "1KiB"], {})


def test_command_line_wins_over_environment_over_file_over_default(tmp_path: Path):
    file = tmp_path / "settings.yaml"
    file.write_text("limit: 1\nshare: 0.1\ncolour: green\n")
    result = toy("--config", str(file), "--limit", "3", limit="2", share="0.2")
    assert result == Toy(limit=3, share=0.2, colour="green")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "limit: 2k\nnames: [a, b]\n"),
        ("a.toml", 'limit = "2k"\nnames = ["a", "b"]\n'),
        ("a.json", '{"limit": 2000, "names": "a,b"}'),
    ],
)
def test_config_files_are_yaml_toml_or_json(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text)
    assert toy("--config", str(tmp_path / name)) == Toy(limit=2000, names=("a", "b"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("limt: 1", "unknown setting limt; did you mean limit?"),
        ("trust-remote-code: true", "xylite never runs code"),
        ("limit: [", "settings.yaml: "),
        ("- limit", "a mapping of settings is needed"),
        ("limit: 0", "limit: expected a whole number of at least 1, got 0"),
        ("fast: 3", "fast: expected bool"),
        ("names: {a: 1}", "names: "),
        ("limit: true", "limit: "),
    ],
)
def test_a_mistake_in_a_file_names_file_and_key(tmp_path: Path, text: str, said: str):
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    message = refusal("--config", str(file))
    assert str(file) in message
    assert said in message


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path):
    assert "No such file" in refusal("--config", str(tmp_path / "no.yaml"))


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_variable_is_as_good_as_none(empty: str):
    names = ("limit", "share", "fast", "names", "levels", "colour", "nested", "prompt", "config")
    assert toy(**dict.fromkeys(names, empty)) == Toy()


def test_environment_is_read_like_flags_and_unknown_names_warn():
    parsed = parse(TOY, [], {"names": "a,b", "fast": "0", "limti": "1", "cache_dir": "/x"})
    assert parsed.structs == (Toy(names=("a", "b"), fast=False),)
    assert parsed.warnings == ("XYLITE_LIMTI is not a setting; did you mean XYLITE_LIMIT?",)
    assert "XYLITE_LIMIT: expected a whole number of at least 1" in refusal(limit="0")


def test_other_names_of_a_setting_work_everywhere(tmp_path: Path):
    serve = Command("serve", "", (EngineConfig, ServerConfig), ("model",))
    file = tmp_path / "a.yaml"
    file.write_text("gpu_memory_utilization: 0.5\n")
    wanted = EngineConfig(device_memory_utilization=0.5)
    for words, env in (
        (["--gpu-memory-utilization", "0.5"], {}),
        (["--config", str(file)], {}),
        ([], {"gpu_memory_utilization": "0.5"}),
    ):
        assert parse(serve, words, env).structs[0] == wanted
    assert set(ALIASES.values()) <= settings(EngineConfig).keys()


def test_help_has_every_flag_and_explains_each_on_request():
    known = settings(EngineConfig, ServerConfig)
    serve = Command("serve", "Serves.", (EngineConfig, ServerConfig), ("model",))
    brief, full = help_text(serve), help_text(serve, "all")
    for setting in known.values():
        assert f"  {setting.flag}" in brief
        assert setting.flag in full
        assert setting.about
        assert setting.group != "other"
    assert help_text(serve, "cache").count("\n--") + 1 == sum(
        s.group == "cache" for s in known.values()
    )
    assert "--no-enable-prefix-caching" in help_text(serve, "prefix-caching")
    assert all(len(line) <= 100 for line in brief.splitlines())
    with pytest.raises(ConfigError, match="groups: model, device"):
        help_text(serve, "nonsense")


def test_help_is_given_whatever_else_the_line_says():
    assert parse(TOY, ["--limit", "3", "--help", "--wrong"], {}).help == help_text(TOY)
    assert parse(TOY, ["-h"], {}).help == help_text(TOY)
    assert parse(TOY, ["--help=two"], {}).help == help_text(TOY, "two")


def test_the_table_for_the_docs_has_one_row_per_setting():
    rows = markdown_table(Toy).splitlines()
    assert len(rows) == 2 + len(settings(Toy))
    assert "| `--limit N` | auto | A limit; auto has none. |" in rows
    assert "| `--prompt TEXT` | none | A text. |" in rows
    assert "| `--colour` | red | A colour. One of green, red. |" in rows


flag_words = st.sampled_from([s.flag for s in settings(Toy).values()] + ["--no-fast", "--nested.a"])
values = st.sampled_from(["1", "0", "-1", "auto", "nan", "1e999", "{}", "[", "red", "", "a,b", "٣"])
words = st.lists(flag_words | values | st.text(string.printable, max_size=6), max_size=6)


@given(words, st.dictionaries(st.sampled_from(["limit", "fast", "levels"]), values))
def test_any_line_gives_settings_or_one_clear_error(line: list[str], environment: dict[str, str]):
    line = [w for w in line if not w.startswith("--config")]
    try:
        parsed = parse(TOY, line, environment)
    except ConfigError as e:
        assert e.message
    else:
        assert parsed.help is not None or isinstance(parsed.structs[0], Toy)


def test_the_environment_may_name_the_config_file_and_flags_name_another(tmp_path: Path):
    for name, limit in (("a", 3), ("b", 4)):
        (tmp_path / name).write_text(f"limit: {limit}")
    named = {"config": str(tmp_path / "a")}
    assert parse(TOY, [], named).structs[0].limit == 3
    assert parse(TOY, ["--config", str(tmp_path / "b")], named).structs[0].limit == 4
    assert parse(TOY, [], {**named, "limit": "5"}).structs[0].limit == 5
    (tmp_path / "a").write_text("limit: 0")
    said = f"XYLITE_CONFIG {tmp_path / 'a'}: limit: expected a whole number of at least 1, got 0"
    assert refusal(**named) == said


class Other(msgspec.Struct):
    place: str = ""


def test_settings_of_other_commands_are_passed_over(tmp_path: Path):
    command = replace(TOY, others=(Other,))
    file = tmp_path / "settings.yaml"
    file.write_text("limit: 3\nplace: here")
    parsed = parse(command, ["--config", str(file)], {"place": "there", "plcae": "x"})
    assert parsed.structs[0].limit == 3
    assert parsed.warnings == ("XYLITE_PLCAE is not a setting",)


def test_help_shows_every_meaning_whole_within_its_width():
    serve = Command("serve", "", (EngineConfig, ServerConfig))
    text = help_text(serve)
    assert text.startswith("usage: xylite serve [flags]\n")
    assert max(map(len, text.splitlines())) <= 96
    for setting in settings(*serve.structs).values():
        assert setting.about in " ".join(text.split())


def test_a_wrong_key_of_the_speculative_config_lists_the_right_ones():
    with pytest.raises(ConfigError, match=r"unknown field num_tokens; known: method, model, num_"):
        speculative({"method": "ngram", "num_tokens": 3})
    with pytest.raises(ConfigError, match=r"no method 'eagle'; known: ngram, suffix, draft_model"):
        speculative({"method": "eagle"})


@pytest.mark.parametrize("blank", ["\n", "\n\n", " "])
def test_blanks_are_a_text_and_no_other_value(blank: str):
    assert toy("--prompt", blank) == Toy(prompt=blank)
    assert refusal("--names", blank) == "--names needs a value"
    assert refusal("--limit", blank) == "--limit needs a value"


@pytest.mark.parametrize("words", [("--config", ""), ("--config=",), ("--config", " ")])
def test_a_config_file_without_a_name_is_a_mistake(words: tuple[str, ...]):
    assert refusal(*words) == "--config needs a value"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (EngineConfig(max_model_len=0), "max_model_len: expected int >= 1, got 0"),
        (EngineConfig(dtype="int3"), "dtype: invalid enum value 'int3'"),  # pyright: ignore
        (EngineConfig(max_num_seqs="3"), "max_num_seqs: expected int, got str"),  # pyright: ignore
        (EngineConfig(override_generation_config={1: 2}), "override_generation_config: "),  # pyright: ignore
        (EngineConfig(seed=object()), "<object object at "),  # pyright: ignore
        # Never with the value: it may be a key.
        (ServerConfig(api_key="secret"), "api_key: expected array, got str"),  # pyright: ignore
    ],
)
def test_a_wrong_setting_of_a_library_is_named_with_limit_and_value(config: Any, said: str):
    with pytest.raises(ConfigError) as e:
        checked(config)
    assert e.value.message.startswith(said)
    assert "secret" not in e.value.message


def test_a_path_is_as_good_as_its_text(tmp_path: Path):
    config = EngineConfig(model=tmp_path, tokenizer=tmp_path / "t")  # pyright: ignore
    assert checked(config) == EngineConfig(model=str(tmp_path), tokenizer=str(tmp_path / "t"))
