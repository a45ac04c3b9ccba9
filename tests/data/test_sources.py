"""Sources: what is found where, and what each kind of file holds."""

import json
import pathlib
from typing import ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations import memory

from twell_jax.data import python_corpus, sources


def write_parquet(path, rows, column="text", kind=None):
  pq.write_table(pa.table({column: pa.array(rows, kind)}), path)


def read(location, text_field="text"):
  """Returns the texts and the undecodable keys at a location."""
  undecodable: list[str] = []
  texts = [
    document.text
    for file in sources.find_files(str(location))
    for document in file.documents(
      name="x", text_field=text_field, report_undecodable=undecodable.append
    )
  ]
  return texts, undecodable


@pytest.mark.parametrize("suffix", sources.TEXT_SUFFIXES)
def test_text_file_is_one_document_byte_for_byte(tmp_path, suffix):
  path = tmp_path / f"a{suffix}"
  path.write_bytes("Grüße\r\n\x00 𝄞\n\n".encode())
  assert read(path) == (["Grüße\r\n\x00 𝄞\n\n"], [])


def test_byte_order_mark_is_dropped(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
  assert read(tmp_path)[0] == ["abc"]


def test_json_lines(tmp_path):
  path = tmp_path / "a.jsonl"
  lines = [
    b'{"body": "one", "n": 1}',
    b"",
    '{"body": "zwölf"}'.encode(),
    b'{"body": null}',
    b'{"body": "\xff"}',
    b'{"body": "\\ud800"}',
    b'{"body": "\\ud83d\\ude00"}',
  ]
  path.write_bytes(b"\n".join(lines))
  texts, undecodable = read(path, "body")
  assert texts == ["one", "zwölf", "😀"]
  assert undecodable == ["x#2", "x#3"]


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("{", r"a\.jsonl:2 is not JSON"),
    ('{"body": "x"}', r"a\.jsonl:2 has no text_field='text'; it has body"),
    ("[1]", r"a\.jsonl:2 has no text_field='text'; it has no fields"),
    ('{"text": 3}', r"a\.jsonl:2: text_field='text' holds int, not text"),
  ],
)
def test_json_line_errors_name_the_line(tmp_path, line, message):
  (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
  with pytest.raises(ValueError, match=message):
    read(tmp_path)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
def test_parquet_rows(tmp_path, kind):
  rows = ["one", None, "zwölf"] + ["row"] * 3000
  write_parquet(tmp_path / "a.parquet", rows, kind=kind)
  texts, undecodable = read(tmp_path)
  assert texts == [row for row in rows if row is not None]
  assert undecodable == []


def test_parquet_dictionary_column(tmp_path):
  column = pa.array(["a", "b", "a"]).dictionary_encode()
  pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
  assert read(tmp_path)[0] == ["a", "b", "a"]


def test_parquet_row_that_is_not_utf8_spoils_no_other(tmp_path):
  rows = [b"one", b"\xff\xfe", b"two"]
  write_parquet(tmp_path / "a.parquet", rows, kind=pa.binary())
  assert read(tmp_path) == (["one", "two"], ["x#1"])


def test_parquet_errors_name_the_column(tmp_path):
  write_parquet(tmp_path / "a.parquet", [1, 2], column="n")
  with pytest.raises(ValueError, match=r"no text_field='text'.* n$"):
    read(tmp_path)
  with pytest.raises(ValueError, match=r"text_field='n' holds int64, not text"):
    read(tmp_path, "n")


def test_folders_are_searched_and_hidden_files_skipped(tmp_path):
  for name in (
    "a.txt",
    "sub/deep/b.md",
    "sub/C.TXT",
    "sub/image.png",
    ".hidden.txt",
    ".git/c.txt",
    "__pycache__/d.py",
  ):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(name)
  assert sorted(read(tmp_path)[0]) == ["a.txt", "sub/C.TXT", "sub/deep/b.md"]
  assert read(tmp_path / "**" / "*.md")[0] == ["sub/deep/b.md"]
  assert read(tmp_path / "s*" / "*")[0] == ["sub/C.TXT"]


def test_name_that_looks_like_a_pattern(tmp_path):
  (tmp_path / "a[1].txt").write_text("brackets")
  assert read(tmp_path / "a[1].txt")[0] == ["brackets"]


@pytest.mark.parametrize("location", ["", "a.pdf", "*.pdf", "no*", "absent"])
def test_location_without_text_is_named(tmp_path, location):
  (tmp_path / "a.pdf").write_text("x")
  where = str(tmp_path / location)
  with pytest.raises(ValueError, match=r"accepted are \.txt \.md") as error:
    sources.find_files(where)
  assert repr(where) in str(error.value)
  assert "\n" not in str(error.value)


def test_unknown_protocol_is_named():
  with pytest.raises(ValueError, match=r"corpus='nope://x/.*': .*not known"):
    sources.find_files("nope://x/*.txt")


def test_urls_of_other_file_systems():
  files = fsspec.filesystem("memory")
  files.pipe("/set/part-0.jsonl", json.dumps({"text": "zero"}).encode())
  sink = pa.BufferOutputStream()
  write_parquet(sink, ["one", "two"])
  files.pipe("/set/part-1.parquet", sink.getvalue().to_pybytes())
  try:
    assert read("memory://set/part-*")[0] == ["zero", "one", "two"]
    assert read("memory://set")[0] == ["zero", "one", "two"]
    assert read("memory://set/*.parquet")[0] == ["one", "two"]
    (before,) = sources.find_files("memory://set/*.jsonl")
    files.pipe("/set/part-0.jsonl", json.dumps({"text": "nil"}).encode())
    (after,) = sources.find_files("memory://set/*.jsonl")
    assert before.version != after.version
  finally:
    files.rm("/set", recursive=True)


class Hub(memory.MemoryFileSystem):
  """A file system as that of a hub: content ids, and errors of its own."""

  protocol = "testhub"
  store: ClassVar[dict] = {}
  error: Exception | None = None

  @classmethod
  def _strip_protocol(cls, path):
    return super()._strip_protocol(path.removeprefix("testhub:/"))

  def find(self, path, **kwargs):
    if self.error:
      raise self.error
    found = super().find(path, **kwargs)
    for info in found.values():
      # Of what is told besides not all is the same every time.
      info |= {"blob_id": "0123abcd", "last_commit": object()}
    return found

  def _open(self, path, *args, **kwargs):
    if self.error:
      raise self.error
    return super()._open(path, *args, **kwargs)


class HubError(Exception):
  """Derived from nothing that we know of."""


@pytest.fixture
def hub(monkeypatch):
  fsspec.register_implementation("testhub", Hub, clobber=True)
  hub = fsspec.filesystem("testhub", skip_instance_cache=True)
  hub.pipe("/set/a.txt", b"here")
  monkeypatch.setattr(Hub, "error", None)
  yield hub
  Hub.store.clear()


@pytest.mark.usefixtures("hub")
def test_the_version_is_the_content_id():
  (file,) = sources.find_files("testhub://set")
  assert file.version == "4:0123abcd"
  assert read("testhub://set") == (["here"], [])


@pytest.mark.usefixtures("hub")
def test_a_hub_that_cannot_be_reached(monkeypatch):
  (file,) = sources.find_files("testhub://set")
  monkeypatch.setattr(Hub, "error", HubError("no\n  route"))
  for location, message in (
    ("testhub://set", r"corpus='testhub://set' cannot be .*; copy the files"),
    ("testhub://set/*", r"cannot be read \(HubError: no route\); copy the f"),
  ):
    with pytest.raises(ValueError, match=message):
      sources.find_files(location)
  with pytest.raises(ValueError, match=r"set/a\.txt cannot be read \(HubError"):
    next(
      file.documents(
        name="x", text_field="text", report_undecodable=pytest.fail
      )
    )


def test_a_parquet_file_damaged_within_is_named(tmp_path):
  path = tmp_path / "a.parquet"
  write_parquet(path, [f"row {i}" for i in range(3000)])
  content = bytearray(path.read_bytes())
  content[4:4000] = b"\xff" * 3996
  path.write_bytes(content)
  with pytest.raises(ValueError, match=r"a\.parquet cannot be read"):
    read(path)


def test_file_urls(tmp_path):
  (tmp_path / "a.txt").write_text("here")
  (by_url,) = sources.find_files(f"file://{tmp_path}/*.txt")
  (by_path,) = sources.find_files(str(tmp_path / "a.txt"))
  assert by_url == by_path == sources.local_file(tmp_path / "a.txt")


@pytest.mark.parametrize(
  ("locations", "names"),
  [
    (["file:///a/b.txt"], ["b.txt"]),
    (["file:///a/b/c.txt", "file:///a/d.txt"], ["b/c.txt", "d.txt"]),
    (["file:///a/b.txt", "file:///a/b.txt/c"], ["b.txt", "b.txt/c"]),
    (["m://a/b.txt", "n://a/b.txt"], ["m:/a/b.txt", "n:/a/b.txt"]),
  ],
)
def test_short_names(locations, names):
  assert sources.short_names(locations) == names


def test_python_sources_hold_library_and_reference():
  found = python_corpus.python_sources()
  paths = [pathlib.PurePosixPath(source.location) for source in found]
  names = {path.name for path in paths}
  assert {"argparse.py", "pathlib.py", "topics.py"} <= names
  folders = {part for path in paths for part in path.parts}
  assert not folders & {"site-packages", "test", "tests", "lib2to3"}
  (topics,) = [s for s in found if isinstance(s, python_corpus.PydocTopics)]
  documents = list(
    topics.documents(name="t", text_field="", report_undecodable=pytest.fail)
  )
  texts = {document.key: document.text for document in documents}
  assert len(texts) == len(documents) > 50
  assert "yield" in texts["t#yield"]


def test_interpreter_without_sources(tmp_path, monkeypatch):
  monkeypatch.setattr(
    python_corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)}
  )
  with pytest.raises(ValueError, match=r"corpus='python'.* name a folder"):
    python_corpus.python_sources()
