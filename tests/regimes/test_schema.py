import re

import pytest

from tessera_cupy.errors import TableError
from tessera_cupy.regimes import Features, load_table

# One of everything that the schema has. Tests replace a line of it.
TABLE = """\
schema: 1
arch: toy
provenance: measured
device: NVIDIA H200
catalog: 0a1b2c
raw_data: ffee01
reasons: |
  Two lines
  of text.
base:
  - attend_mma/q64k64/retain-pack/rows
  - attend_mma/q64k64/split-pack/rows
keys:
  - match:
      block_q: 64
      block_kv: {from: 16, to: 64}
      ragged: false
      token_bits: false
      dtype: bfloat16
      head_dim: {to: 128}
      layout: BHSD
    why: one line
    edges: {heads: [8], tokens: [4096, 32768], density: [0.1, 0.3], run_coverage: [0.5]}
    regimes:
      - when: {tokens: {below: 4096}, density: {from: 0.1, below: 0.3}}
        plans: [attend_mma/q64k64/retain-pack/longest]
      - when: {tokens: {from: 32768}, heads: {from: 8}, run_coverage: {below: 0.5}}
        plans: [attend_mma/q128k64/merge-pack/longest, attend_mma/q64k64/retain-pack/longest]
"""


def load(tmp_path, text, name="toy.yaml"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_table(path)


def refused(tmp_path, text, line, field, *said):
    """The table is refused, in one line that names file, line, field, and how to fix it."""
    with pytest.raises(TableError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    where = f"{tmp_path / 'toy.yaml'}, line {line}, field `{field}`: "
    assert message.startswith(where + "expected "), message
    assert re.search(r", got .+\. Fix: .+\.$", message), message
    for words in said:
        assert words in message


def line_of(text, part):
    return text[: text.index(part)].count("\n") + 1


def test_every_field_is_read(tmp_path):
    document = load(tmp_path, TABLE).document
    assert (document.arch, document.provenance) == ("toy", "measured")
    assert (document.device, document.catalog) == ("NVIDIA H200", "0a1b2c")
    assert document.raw_data == "ffee01"
    assert document.reasons == "Two lines\nof text."
    assert [plan.mapping.q for plan in document.base] == ["retain", "split"]
    (key,) = document.keys
    match = key.match
    assert (match.block_q.low, match.block_q.high) == (64, 65)
    assert (match.block_kv.low, match.block_kv.high) == (16, 65)
    assert (match.ragged, match.token_bits) == (False, False)
    assert (match.dtype, match.layout) == ("bfloat16", "BHSD")
    assert match.head_dim.high == 129
    assert key.why == "one line"
    assert key.edges == ((8,), (4096, 32768), (0.1, 0.3), (0.5,), (), ())
    assert [len(regime.plans) for regime in key.regimes] == [1, 2]


@pytest.mark.parametrize("written", ["1e-1", "0.1", ".1", "1.0E-1", "0.10"])
def test_a_number_may_be_written_in_any_decimal_way(tmp_path, written):
    table = load(tmp_path, TABLE.replace("[0.1, 0.3]", f"[{written}, 3e-1]"))
    assert table.document.keys[0].edges[2] == (0.1, 0.3)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("bfloat16", '"bfloat16"'),
        ("schema: 1", "# a note\n\nschema: 1   # one"),
        ("[4096, 32768]", "\n      [\n        4096, 32768,\n      ]"),
        ("block_q: 64", "block_q: {from: 64, to: 64}"),
        ("block_q: 64", "block_q: !!int 64"),
        ("\n", "\r\n"),
        ("schema: 1", "\ufeffschema: 1"),
    ],
)
def test_other_ways_to_write_the_same(tmp_path, old, new):
    first, second = load(tmp_path, TABLE), load(tmp_path, TABLE.replace(old, new))
    assert second.plans() == first.plans()
    for name in ("match", "why", "edges"):
        pair = [getattr(table.document.keys[0], name) for table in (first, second)]
        assert pair[0] == pair[1]


@pytest.mark.parametrize(
    ("old", "new", "field", "said"),
    [
        # Types, and what YAML 1.1 makes of words and numbers.
        ("ragged: false", "ragged: off", "keys[0].match.ragged", "true or false"),
        ("ragged: false", "ragged: no", "keys[0].match.ragged", "true or false"),
        ("ragged: false", "ragged: yes", "keys[0].match.ragged", "true or false"),
        ("ragged: false", "ragged: False", "keys[0].match.ragged", "lower case"),
        ("ragged: false", 'ragged: "false"', "keys[0].match.ragged", "unquoted"),
        ("ragged: false", "ragged: 0", "keys[0].match.ragged", "got 0"),
        ("dtype: bfloat16", "dtype: off", "keys[0].match.dtype", "truth value"),
        ("layout: BHSD", "layout: bhsd", "keys[0].match.layout", "BHSD, BSHD"),
        ("layout: BHSD", "layout: BHSD\n      mask: blocks", "keys[0].match.mask", "one of slices"),
        ("device: NVIDIA H200", "device: on", "device", "quotes"),
        ("catalog: 0a1b2c", "catalog: 12", "catalog", "quotes"),
        ("catalog: 0a1b2c", "catalog:", "catalog", "(null)"),
        ("raw_data: ffee01", "raw_data: ''", "raw_data", "a text"),
        ("schema: 1", "schema: one", "schema", "whole number"),
        ("schema: 1", "schema: '1'", "schema", "unquoted"),
        ("schema: 1", "schema: 2", "schema", "version 1"),
        ("schema: 1", "schema: 1.0", "schema", "whole number"),
        ("block_q: 64", "block_q: 064", "keys[0].match.block_q", "064"),
        ("block_q: 64", "block_q: 0x40", "keys[0].match.block_q", "0x40"),
        ("block_q: 64", "block_q: 1:04", "keys[0].match.block_q", "1:04"),
        ("block_q: 64", "block_q: 6_4", "keys[0].match.block_q", "6_4"),
        ("block_q: 64", "block_q: !size 64", "keys[0].match.block_q", "decimal digits"),
        ("block_q: 64", "block_q: 0", "keys[0].match.block_q", "from 1 to"),
        ("block_q: 64", "block_q: " + "9" * 5000, "keys[0].match.block_q", "from 1 to"),
        ("block_q: 64", "block_q: any", "keys[0].match.block_q", "got any"),
        ("block_q: 64", "block_q: [64]", "keys[0].match.block_q", "a list"),
        ("{from: 16, to: 64}", "{from: 64, to: 16}", "keys[0].match.block_kv", "64 to 16"),
        ("{from: 16, to: 64}", "{}", "keys[0].match.block_kv", "neither"),
        ("density: [0.1,", "density: ['0.1',", "keys[0].edges.density[0]", "unquoted"),
        ("density: [0.1,", "density: [1e999,", "keys[0].edges.density[0]", "from 0 to 1"),
        ("density: [0.1,", "density: [.nan,", "keys[0].edges.density[0]", ".nan"),
        ("density: [0.1,", "density: [1.5,", "keys[0].edges.density[0]", "from 0 to 1"),
        ("tokens: [4096,", "tokens: [1e3,", "keys[0].edges.tokens[0]", "1e3"),
        ("heads: [8]", "heads: 8", "keys[0].edges.heads", "a list"),
        ("heads: [8]", "heads: []", "keys[0].edges.heads", "empty list"),
        ("why: one line", "why: [one]", "keys[0].why", "a list"),
        ("why: one line", 'why: "two\\nlines"', "keys[0].why", "one line"),
        ("why: one line", "why: yes", "keys[0].why", "truth value"),
        # Names.
        ("schema: 1", "schema: 1\ncolour: red", "colour", "unknown field `colour`"),
        ("why: one line", "wy: one line", "keys[0].wy", "match, why, regimes, edges, cases"),
        ("dtype: bfloat16", "off: bfloat16", "keys[0].match.off", "unknown field `off`"),
        ("heads: [8]", "head: [8]", "keys[0].edges.head", "heads, tokens"),
        ("{below: 4096}", "{to: 4096}", "keys[0].regimes[0].when.tokens.to", "from, below"),
        ("schema: 1", "schema: 1\nschema: 1", "schema", "a second one, the first is at line 1"),
        (
            "dtype: bfloat16",
            "dtype: bfloat16\n      dtype: float16",
            "keys[0].match.dtype",
            "the first is at line 19",
        ),
        ("provenance: measured", "provenance: guessed", "provenance", "default, model"),
        ("arch: toy", "arch: sm90", "arch", "as in the file's name"),
        # Edges and the bounds that refer to them.
        ("[4096, 32768]", "[32768, 4096]", "keys[0].edges.tokens[1]", "4096 after 32768"),
        ("[4096, 32768]", "[4096, 4096]", "keys[0].edges.tokens[1]", "ascending"),
        ("{below: 4096}", "{below: 4097}", "keys[0].regimes[0].when.tokens.below", "4096, 32768"),
        ("{from: 8}", "{from: 8, below: 8}", "keys[0].regimes[1].when.heads", "lower than"),
        ("{from: 8}", "{}", "keys[0].regimes[1].when.heads", "neither"),
        ("heads: {from: 8}", "heads: 8", "keys[0].regimes[1].when.heads", "fields with names"),
        # Plans.
        ("q64k64/split-pack/rows", "q64k64/split-pck/rows", "base[1]", "'pck'"),
        ("attend_mma/q128k64", "attend_xyz/q128k64", "keys[0].regimes[1].plans[0]", "attend_xyz"),
        ("q128k64/merge-pack", "q64k64/retain-pack", "keys[0].regimes[1].plans[1]", "again"),
        ("q64k64/split-pack/rows", "q64k64/retain-pack/longest", "base", "none for blocks of 65"),
        ("q64k64/retain-pack/rows", "q64k64/retain-retain/rows", "base", "x 65"),
        ("q64k64/retain-pack/rows", "q64k64/merge-pack/rows", "base", "at most 32 x 32"),
        ("q64k64/retain-pack/rows", "q32k64/retain-pack/rows", "base", "blocks of 33 x"),
    ],
)
def test_wrong_fields_are_named_with_file_and_line(tmp_path, old, new, field, said):
    # The error is on the line where the replacement ends, or for `base` where its list begins.
    line = line_of(TABLE, old) + new.count("\n")
    if field == "base":
        line = line_of(TABLE, "base:") + 1
    refused(tmp_path, TABLE.replace(old, new, 1), line, field, said)


FIELDS = [
    ("", "schema"),
    ("", "arch"),
    ("", "provenance"),
    ("", "device"),
    ("", "catalog"),
    ("", "raw_data"),
    ("    ", "why"),
]


@pytest.mark.parametrize(("indent", "name"), FIELDS)
def test_a_missing_field_is_named(tmp_path, indent, name):
    text = re.sub(rf"(?m)^{indent}{name}: .*\n", "", TABLE)
    field, line = (f"keys[0].{name}", line_of(text, "match:")) if indent else (name, 1)
    refused(tmp_path, text, line, field, "got nothing", f"add `{name}: ...`")


def test_missing_lists_are_named(tmp_path):
    head, tail = TABLE.split("base:\n")
    base, keys = tail.split("keys:\n")
    refused(tmp_path, head + "keys:\n" + keys, 1, "base", "got nothing")
    refused(tmp_path, head + "base:\n" + base, 1, "keys", "got nothing")
    refused(tmp_path, head + "base:\n" + base + "keys: []\n", 13, "keys", "an empty list")
    refused(tmp_path, head + "base:\n" + base + "keys:\n", 13, "keys", "nothing (null)")
    for name in ("when", "plans"):
        text = re.sub(rf"(      - |        ){name}: ", r"\1wrong: ", TABLE, count=1)
        line = line_of(text, "wrong")
        refused(tmp_path, text, line, "keys[0].regimes[0].wrong", f"{name}")


def test_where_a_table_comes_from_fits_its_provenance(tmp_path):
    refused(tmp_path, TABLE.replace("device: NVIDIA H200", "device: null"), 4, "device", "measured")
    default = TABLE.replace("provenance: measured", "provenance: default")
    refused(tmp_path, default, 4, "device", "write null")
    for name in ("device", "catalog", "raw_data"):
        default = re.sub(rf"(?m)^{name}: .*$", f"{name}: null", default)
    assert load(tmp_path, default).document.device is None
    model = default.replace("provenance: default", "provenance: model")
    assert load(tmp_path, model).document.provenance == "model"
    assert load(tmp_path, model.replace("device: null", "device: A100")).document.device == "A100"


@pytest.mark.parametrize("text", ["", "\n\n", "# only a note\n", "---\n", "\ufeff"])
def test_an_empty_file(tmp_path, text):
    refused(tmp_path, text, 1, "file", "an empty file")


def test_tabs(tmp_path):
    line = line_of(TABLE, "dtype:")
    refused(tmp_path, TABLE.replace("      dtype:", "\tdtype:"), line, "dtype", "a tab", "spaces")
    refused(tmp_path, TABLE.replace("dtype: b", "dtype:\tb"), line, "dtype", "a tab")
    refused(tmp_path, TABLE.replace("why: one line", "why: one\tline"), 22, "why", "a tab")
    regime = line_of(TABLE, "- when")
    refused(tmp_path, TABLE.replace("      - when", "\t- when", 1), regime, "when", "a tab")


def test_files_that_are_not_yaml(tmp_path):
    refused(tmp_path, TABLE.replace("32768]", "32768", 1), 23, "edges", "valid YAML")
    refused(tmp_path, TABLE[: TABLE.index("32768]")], 23, "edges", "valid YAML")
    refused(tmp_path, TABLE.rstrip("\n") + "]\n", 28, "plans", "valid YAML")
    refused(tmp_path, TABLE.replace("why: one", "why: one: "), 22, "why", "valid YAML")
    refused(tmp_path, TABLE.replace("    why:", "   why:"), 22, "why", "valid YAML")
    refused(tmp_path, TABLE.replace("why: one", "why: *one"), 22, "why", "valid YAML")
    refused(tmp_path, TABLE + "---\nschema: 1\n", TABLE.count("\n") + 1, "file", "valid YAML")
    refused(tmp_path, TABLE.replace("one line", "one \x07 line"), 22, "why", "'\\x07'")
    refused(tmp_path, TABLE.replace("why: one", "why:\u00a0one"), 22, "why", "'\\xa0'")
    refused(tmp_path, TABLE.encode().replace(b"one line", b"one \xff"), 22, "why", "byte 0xff")
    refused(tmp_path, "just a text\n", 1, "file", "fields with names", "got just a text")
    refused(tmp_path, "- a\n- b\n", 1, "file", "got a list")


def test_files_that_cannot_be_read(tmp_path):
    refused_path = tmp_path / "toy.yaml"
    with pytest.raises(TableError, match=r"`path`: .* a profile table, .*toy\.yaml', where there"):
        load_table(refused_path)
    refused_path.mkdir()
    with pytest.raises(TableError, match=r"`path`: .*toy\.yaml', a folder\. Fix: check the path"):
        load_table(str(refused_path))


def test_the_name_of_a_shipped_table_is_no_path():
    with pytest.raises(TableError) as caught:
        load_table("sm90")
    message = str(caught.value)
    assert "`path`: expected the path of a profile table, a .yaml file, got 'sm90'" in message
    assert 'load_for("sm90")' in message
    shipped = message.split('give "')[1].split('"')[0]
    assert load_table(shipped).document.arch == "sm90"
    assert "line" not in message


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    path = tmp_path / "toy.yaml"
    path.write_text(TABLE)

    def refuses(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "read_text", refuses)
    with pytest.raises(TableError, match="a readable file, got Permission denied"):
        load_table(path)


def test_the_pure_python_parser_says_the_same(tmp_path, monkeypatch):
    import yaml

    from tessera_cupy.regimes import strict_yaml

    monkeypatch.setattr(strict_yaml, "_Loader", yaml.SafeLoader)
    assert len(load(tmp_path, TABLE).plans()) == 4
    test_files_that_are_not_yaml(tmp_path)
    test_tabs(tmp_path)
    test_an_empty_file(tmp_path, "")


@pytest.mark.parametrize("loader", ["CSafeLoader", "SafeLoader"])
@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 5000])
def test_what_nests_without_end_is_refused(tmp_path, monkeypatch, loader, text):
    import yaml

    from tessera_cupy.regimes import strict_yaml

    monkeypatch.setattr(strict_yaml, "_Loader", getattr(yaml, loader, yaml.SafeLoader))
    with pytest.raises(TableError, match=r"toy\.yaml, line 1, .* Fix: "):
        load(tmp_path, text)


def test_an_alias_is_only_a_copy(tmp_path):
    text = TABLE.replace("block_kv: {from: 16, to: 64}", "block_kv: &size {to: 128}")
    text = text.replace("head_dim: {to: 128}", "head_dim: *size")
    assert load(tmp_path, text).document.keys[0].match.head_dim.high == 129
    text = TABLE.replace("heads: [8]", "heads: &a [*a]")
    refused(tmp_path, text, 23, "keys[0].edges.heads[0]", "a list")


def test_features_have_the_fields_that_the_schema_matches():
    # A feature without a place in the schema could never be decided by.
    known = {"block_q", "block_kv", "ragged", "token_bits", "dtype", "head_dim", "layout"}
    known |= {"heads", "tokens", "density", "run_coverage"}
    known |= {"slices"}  # as `mask: slices`
    assert set(Features._fields) == known
