"""The TFDS builder that turns sources of text into a prepared data set.

The prepared set has one feature, `text`, and the splits `train` and `held_out`.
It is written as ArrayRecord files and read as a random-access data source;
TensorFlow is not needed for either.
"""

import contextlib
import hashlib
import io
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import tensorflow_datasets as tfds
from absl import logging

from twell_jax.data import sources as sources_lib

TRAIN = "train"
HELD_OUT = "held_out"

_UNDECODABLE_NAMED_IN_LOG = 5


class LocalText(tfds.core.GeneratorBasedBuilder):
  """Documents of local (or fsspec) files, split by a hash of their content.

  A document goes to `held_out` if the hash of its text, read as a number in
  [0, 1), is below `held_out_fraction`. Copies of a text therefore always lie
  on the same side. Documents of white space only are left out.
  """

  VERSION = tfds.core.Version("1.0.0")
  RELEASE_NOTES = {"1.0.0": "Initial release."}  # noqa: RUF012 (TFDS's own form)

  def __init__(
    self,
    *,
    sources: Sequence[sources_lib.Source],
    text_field: str,
    held_out_fraction: float,
    max_documents: int,
    spool: TextIO,
    **kwargs: Any,
  ):
    """Makes the builder; see `prepare`, which is the way to use it.

    Args:
      sources: where the documents come from, in reading order.
      text_field: the field of records that holds the text.
      held_out_fraction: the expected part of documents in `held_out`.
      max_documents: how many documents to read; 0 reads all.
      spool: an empty file, open for writing and reading, that keeps held-out
        documents until their split is written, so that sources are read once.
      **kwargs: those of the base class.
    """
    self._sources = sources
    self._text_field = text_field
    self._held_out_fraction = held_out_fraction
    self._max_documents = max_documents
    self._spool = spool
    self._undecodable: list[str] = []
    super().__init__(**kwargs)

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description="Documents of text files.",
      features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
    )

  def _split_generators(
    self, dl_manager: tfds.download.DownloadManager
  ) -> dict[str, Iterator[tuple[str, dict[str, str]]]]:
    del dl_manager  # Nothing is downloaded by TFDS.
    splits = {TRAIN: self._generate_examples()}
    if self._held_out_fraction > 0:
      splits[HELD_OUT] = self._spooled_examples()
    return splits

  def _generate_examples(self) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the train documents, spooling the others on the way."""
    kept = {TRAIN: 0, HELD_OUT: 0}
    for document in self._documents():
      if content_fraction(document.text) < self._held_out_fraction:
        kept[HELD_OUT] += 1
        self._spool.write(json.dumps(document) + "\n")
      else:
        kept[TRAIN] += 1
        yield document.key, {"text": document.text}
    self._report_undecodable()
    self._check_splits(kept)
    self._spool.seek(0)

  def _spooled_examples(self) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the held-out documents; TFDS asks for them after the others."""
    for line in self._spool:
      document = sources_lib.Document(*json.loads(line))
      yield document.key, {"text": document.text}

  def _documents(self) -> Iterator[sources_lib.Document]:
    names = sources_lib.short_names([s.location for s in self._sources])
    num_documents = 0
    for name, source in zip(names, self._sources, strict=True):
      for document in source.documents(
        name=name,
        text_field=self._text_field,
        report_undecodable=self._undecodable.append,
      ):
        if not document.text or document.text.isspace():
          continue
        yield document
        num_documents += 1
        if num_documents == self._max_documents:
          return

  def _report_undecodable(self) -> None:
    if self._undecodable:
      logging.warning(
        "%d documents are not UTF-8 and were left out: %s%s",
        len(self._undecodable),
        ", ".join(self._undecodable[:_UNDECODABLE_NAMED_IN_LOG]),
        ", ..." if len(self._undecodable) > _UNDECODABLE_NAMED_IN_LOG else "",
      )

  def _check_splits(self, kept: dict[str, int]) -> None:
    total = sum(kept.values())
    if total == 0:
      raise ValueError(
        f"the corpus ({self._sources[0].location}, ...) holds no text:"
        f" {len(self._undecodable)} documents are not UTF-8, the rest is blank"
      )
    if kept[TRAIN] and (kept[HELD_OUT] or not self._held_out_fraction):
      return
    empty = HELD_OUT if kept[TRAIN] else TRAIN
    raise ValueError(
      f"held_out_fraction={self._held_out_fraction} of {total} documents leaves"
      f" the {empty} split empty; give more documents (the split is by whole"
      " document), another fraction, or 0 to hold nothing out"
    )


def content_fraction(text: str) -> float:
  """Returns a number in [0, 1) that is a hash of the text."""
  digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
  return int.from_bytes(digest, "big") / 2**48


def prepare(
  sources: Sequence[sources_lib.Source],
  *,
  text_field: str,
  held_out_fraction: float,
  max_documents: int,
  directory: pathlib.Path,
) -> tfds.core.DatasetBuilder:
  """Prepares the documents in `directory` unless they already are there.

  TFDS writes under a temporary name and renames at the end, so that what is
  found here is complete.

  Args:
    sources: where the documents come from, in reading order.
    text_field: the field of records that holds the text.
    held_out_fraction: the expected part of documents in `held_out`.
    max_documents: how many documents to read; 0 reads all.
    directory: belongs to exactly these arguments.

  Returns:
    A builder to read them with, by `as_data_source`.

  Raises:
    ValueError: there is no text, or a split would be empty.
  """
  prepared = directory / LocalText.name / str(LocalText.VERSION)
  if not prepared.exists():
    directory.mkdir(parents=True, exist_ok=True)
    tfds.disable_progress_bar()
    with (
      tempfile.TemporaryFile("w+", encoding="utf-8", dir=directory) as spool,
      # TFDS prints two lines to stdout, which belongs to our callers.
      contextlib.redirect_stdout(io.StringIO()),
    ):
      builder = LocalText(
        sources=sources,
        text_field=text_field,
        held_out_fraction=held_out_fraction,
        max_documents=max_documents,
        spool=spool,
        data_dir=directory,
        file_format="array_record",
      )
      try:
        builder.download_and_prepare(
          download_dir=os.fspath(directory),
          download_config=tfds.download.DownloadConfig(try_download_gcs=False),
        )
      except OSError:
        # Another process may have finished the same preparation first.
        if not prepared.exists():
          raise
  return tfds.builder_from_directory(prepared)
