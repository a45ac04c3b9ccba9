"""Where documents come from: text files, folders, globs, URLs, TFDS sets.

A source yields documents one at a time and never holds a file of many
documents whole:

  suffix               documents
  .txt .md .py .rst    the file is one document
  .jsonl               one per line, under `text_field`
  .parquet             one per row, under `text_field`, read in batches

Files are opened through fsspec, so that a URL (`hf://datasets/...`, `gs://...`)
serves wherever a path does; the package of a protocol (huggingface_hub for
`hf://`) is imported by fsspec when such a URL is met.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import posixpath
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol

import fsspec
import fsspec.core
import tensorflow_datasets as tfds

from twell_jax.data import remote

TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")
RECORD_SUFFIXES = (".jsonl", ".parquet")
SUFFIXES = TEXT_SUFFIXES + RECORD_SUFFIXES

_PARQUET_ROWS_PER_BATCH = 1024
# How file systems without times of change call what names a file's content.
_CONTENT_IDS = ("blob_id", "ETag", "etag")


class Document(NamedTuple):
  """One text and the name it has nowhere else in its corpus."""

  key: str
  text: str


class Source(Protocol):
  """Something that documents are read from."""

  @property
  def location(self) -> str:
    """Where it lies, in full."""
    ...

  @property
  def version(self) -> str:
    """Changes when the content does."""
    ...

  def documents(
    self,
    *,
    name: str,
    text_field: str,
    report_undecodable: Callable[[str], None],
  ) -> Iterator[Document]:
    """Yields the documents in their order.

    Args:
      name: what the keys of the documents begin with.
      text_field: the field that holds the text in records.
      report_undecodable: called with the key of each document that is left
        out because it is not UTF-8.
    """
    ...


@dataclasses.dataclass(frozen=True)
class TextFile:
  """A file with one of the suffixes above; a `Source`."""

  filesystem: fsspec.AbstractFileSystem
  path: str
  version: str

  @property
  def location(self) -> str:
    """The file's URL."""
    return self.filesystem.unstrip_protocol(self.path)

  def documents(
    self,
    *,
    name: str,
    text_field: str,
    report_undecodable: Callable[[str], None],
  ) -> Iterator[Document]:
    """Yields the file's documents (see `Source.documents`)."""
    suffix = _suffix(self.path)
    with (
      remote.read_errors(
        self.location,
        remedy="try again, which keeps what is finished, or copy the file here",
      ),
      self.filesystem.open(self.path, "rb") as file,
    ):
      if suffix == ".jsonl":
        texts = _json_lines_texts(file, self.location, text_field)
      elif suffix == ".parquet":
        texts = _parquet_texts(file, self.location, text_field)
      else:
        texts = iter([file.read()])
      for index, raw in enumerate(texts):
        key = f"{name}#{index}"
        try:
          # "utf-8-sig" drops a byte order mark.
          text = raw.decode("utf-8-sig")
        except UnicodeDecodeError:
          report_undecodable(key)
        else:
          yield Document(key, text)


def find_files(location: str) -> list[TextFile]:
  """Returns the text files at a path, folder, glob or URL of these.

  Folders are searched recursively, without hidden files and `__pycache__`.

  Raises:
    ValueError: nothing is there, or nothing with an accepted suffix, or it
      cannot be looked at.
  """
  try:
    filesystem, path = fsspec.core.url_to_fs(location)
  except (ImportError, ValueError) as error:
    # The protocol is unknown, or fsspec says which package it needs.
    raise ValueError(f"corpus={location!r}: {error}") from error
  accepted = f"accepted are {' '.join(SUFFIXES)}"
  is_folder = False
  with remote.read_errors(
    f"corpus={location!r}", remedy="copy the files here and give their path"
  ):
    if filesystem.isfile(path):
      infos = {path: filesystem.info(path)}
    elif filesystem.isdir(path):
      infos = filesystem.find(path, detail=True)
      is_folder = True
    else:
      infos = filesystem.glob(path, detail=True)
  if not infos and not is_folder:
    raise ValueError(
      f"corpus={location!r}: there is no such file or folder and nothing"
      f" matches it as a pattern; {accepted}"
    )
  files = [
    TextFile(filesystem, found, _version(filesystem, found, info))
    for found, info in sorted(infos.items())
    if info["type"] == "file"
    and _suffix(found) in SUFFIXES
    and not (is_folder and _is_hidden(posixpath.relpath(found, path)))
  ]
  if not files:
    raise ValueError(f"corpus={location!r} holds no text file; {accepted}")
  return files


def local_file(path: pathlib.Path) -> TextFile:
  """Returns one local text file."""
  filesystem = fsspec.filesystem("file")
  info = filesystem.info(os.fspath(path))
  return TextFile(
    filesystem, info["name"], _version(filesystem, info["name"], info)
  )


@dataclasses.dataclass(frozen=True)
class NamedSet:
  """The train split of a data set that TFDS knows by name; a `Source`.

  Attributes:
    location: The name, in full.
    version: Changes when the content does.
    data: A TFDS data source.
    rows: Which of its examples.
    num_files: In how many files they are.
  """

  location: str
  version: str
  data: Any = dataclasses.field(repr=False, compare=False)
  rows: range
  num_files: int

  def parts(self) -> list["NamedSet"]:
    """Itself in runs of examples, about as many as there are files."""
    rows = len(self.rows)
    count = max(min(self.num_files, rows), 1)
    bounds = [rows * i // count for i in range(count + 1)]
    return [
      dataclasses.replace(
        self,
        location=f"{self.location}[{start}:{stop}]",
        rows=self.rows[start:stop],
        num_files=1,
      )
      for start, stop in itertools.pairwise(bounds)
    ]

  def documents(
    self,
    *,
    name: str,
    text_field: str,
    report_undecodable: Callable[[str], None],
  ) -> Iterator[Document]:
    """Yields the split's documents (see `Source.documents`)."""
    for index in self.rows:
      example = self.data[index]
      if text_field not in example:
        raise ValueError(
          f"{self.location} has no text_field={text_field!r}; its fields are"
          f" {', '.join(sorted(example))}"
        )
      raw = example[text_field]
      if not isinstance(raw, bytes):
        raise ValueError(
          f"{self.location}: text_field={text_field!r} holds"
          f" {type(raw).__name__}, not text"
        )
      key = f"{name}#{index}"
      try:
        yield Document(key, raw.decode())
      except UnicodeDecodeError:
        report_undecodable(key)


def find_named_set(name: str) -> NamedSet:
  """Returns a TFDS data set's train split, preparing it where TFDS can.

  Args:
    name: as TFDS writes it, e.g. "c4/en" or "c4/en:3.1.0"; prepared sets are
      looked for where TFDS_DATA_DIR says.

  Raises:
    ValueError: TFDS does not know the name, or the set has no train split.
  """
  try:
    builder = tfds.builder(name, file_format="array_record")
  except tfds.core.DatasetNotFoundError as error:
    raise ValueError(
      f"corpus='tfds:{name}': TFDS knows no such data set and finds none"
      " prepared; check the name or set TFDS_DATA_DIR"
    ) from error
  builder.download_and_prepare(file_format="array_record")
  if "train" not in builder.info.splits:
    raise ValueError(
      f"corpus='tfds:{name}' has no train split; its splits are"
      f" {', '.join(builder.info.splits)}"
    )
  split = builder.info.splits["train"]
  return NamedSet(
    location=f"tfds:{builder.info.full_name}",
    version=f"{split.num_examples}:{split.num_bytes}",
    data=builder.as_data_source(split="train"),
    rows=range(split.num_examples),
    num_files=split.num_shards,
  )


def in_parts(sources: Sequence[Source]) -> list[Source]:
  """Sources of which none holds more than a file."""
  parts: list[Source] = []
  for source in sources:
    parts += source.parts() if isinstance(source, NamedSet) else [source]
  return parts


def short_names(locations: list[str]) -> list[str]:
  """Returns the locations without the folders that they all share.

  The names of a corpus' documents then do not depend on where it lies.
  """
  parts = [[p for p in location.split("/") if p] for location in locations]
  shared = 0
  # The last part, a file's own name, is never taken for a folder.
  while all(
    len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts
  ):
    shared += 1
  return ["/".join(p[shared:]) for p in parts]


def _suffix(path: str) -> str:
  return posixpath.splitext(path)[1].lower()


def _is_hidden(relative_path: str) -> bool:
  return any(
    part.startswith(".") or part == "__pycache__"
    for part in relative_path.split("/")
  )


def _version(
  filesystem: fsspec.AbstractFileSystem, path: str, info: dict
) -> str:
  if "mtime" in info:
    return f"{info['size']}:{info['mtime']!r}"
  for name in _CONTENT_IDS:
    if info.get(name):
      return f"{info['size']}:{info[name]}"
  return filesystem.ukey(path)


def _json_lines_texts(
  file: BinaryIO, location: str, text_field: str
) -> Iterator[bytes]:
  for number, line in enumerate(file, start=1):
    if not line.strip():
      continue
    try:
      text_line = line.decode("utf-8-sig")
    except UnicodeDecodeError:
      yield line  # The caller meets the same error and reports it.
      continue
    try:
      record = json.loads(text_line)
    except json.JSONDecodeError as error:
      raise ValueError(f"{location}:{number} is not JSON: {error}") from error
    if not isinstance(record, dict) or text_field not in record:
      found = ", ".join(record) if isinstance(record, dict) else "no fields"
      raise ValueError(
        f"{location}:{number} has no text_field={text_field!r}; it has {found}"
      )
    text = record[text_field]
    if text is None:
      continue
    if not isinstance(text, str):
      raise ValueError(
        f"{location}:{number}: text_field={text_field!r} holds"
        f" {type(text).__name__}, not text"
      )
    # JSON can write half a surrogate pair, which is no text either.
    yield text.encode("utf-8", errors="surrogatepass")


def _parquet_texts(
  file: BinaryIO, location: str, text_field: str
) -> Iterator[bytes]:
  # Imported here because other corpora do not need pyarrow.
  import pyarrow as pa
  import pyarrow.parquet as pq

  try:
    table = pq.ParquetFile(file)
  except pa.ArrowInvalid as error:
    raise ValueError(f"{location} is not a Parquet file: {error}") from error
  with table:
    names = table.schema_arrow.names
    if text_field not in names:
      raise ValueError(
        f"{location} has no text_field={text_field!r}; its columns are"
        f" {', '.join(names)}"
      )
    for batch in table.iter_batches(
      batch_size=_PARQUET_ROWS_PER_BATCH, columns=[text_field]
    ):
      column = batch.column(0)
      if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
      if not _is_parquet_text(column.type):
        raise ValueError(
          f"{location}: text_field={text_field!r} holds {column.type}, not text"
        )
      # As bytes, because one bad row must not spoil the batch.
      for raw in column.cast(pa.large_binary()).to_pylist():
        if raw is not None:
          yield raw


def _is_parquet_text(kind: Any) -> bool:
  import pyarrow as pa

  return (
    pa.types.is_string(kind)
    or pa.types.is_large_string(kind)
    or pa.types.is_binary(kind)
    or pa.types.is_large_binary(kind)
  )
