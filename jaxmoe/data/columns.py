# SPDX-License-Identifier: Apache-2.0
"""Floor 5. Records of ArrayRecord files and of Parquet tables.

ArrayRecord holds `tf.train.Example` messages, as TFDS writes them. Their schema is
built here, since it is all that is needed of TensorFlow.
"""

from __future__ import annotations

import os
from typing import Any

from jaxmoe.config_base import ConfigError, mistake, shown_path
from jaxmoe.data.fields import BrokenRecord
from jaxmoe.data.readers import Blob, Raw, text_of
from jaxmoe.data.tokenizer import LANGUAGES

NAMES = ("image", *LANGUAGES, "text", "language", "tasks")  # of fields.parse_fields


class ArrayRecords:
    """Files of `tf.train.Example`: `image` is the encoded picture, the rest is text."""

    def __init__(self, files: list[str]):
        from grain import sources  # here, because importing it takes a second

        self.left_out: dict[str, int] = {}
        self._files = files
        try:
            self._records: Any = sources.ArrayRecordDataSource(files)
            self._count = len(self._records)
        except (ValueError, RuntimeError, OSError) as error:
            shown = ", ".join(shown_path(file) for file in files[:3])
            raise mistake(
                f"{shown} cannot be read ({str(error)[:200]})",
                "its ending says that it is an ArrayRecord file",
                "Give a file that an ArrayRecordWriter wrote and closed",
            ) from error
        self._example = example_message()

    def __len__(self) -> int:
        return self._count

    def name(self, index: int) -> str:
        return f"{shown_path(self._files[0])}, record {index}"

    def raw(self, index: int) -> Raw:
        message = self._example()
        try:
            message.ParseFromString(self._records[index])
        except Exception as error:  # of protobuf, or of the file, both without a base
            text = f"it is no tf.train.Example ({error})"
            raise BrokenRecord(text[:200]) from error
        fields: dict[str, Any] = {}
        for name in NAMES:
            if name in message.features.feature:
                values = list(message.features.feature[name].bytes_list.value)
                if name == "image":
                    fields[name] = values[0] if values else None
                else:
                    texts = [text_of(value) for value in values]
                    single = name == "language" and len(texts) == 1
                    fields[name] = texts[0] if single else texts
        return Raw(fields, fields.pop("image", None) or None)


def example_message() -> type[Any]:
    """The class of `tf.train.Example` messages, in a pool of its own."""
    from google.protobuf import (
        descriptor_pb2,
        descriptor_pool,
        json_format,
        message_factory,
    )

    file = descriptor_pb2.FileDescriptorProto()
    pool = descriptor_pool.DescriptorPool()
    pool.Add(json_format.ParseDict(_SCHEMA, file))
    found = pool.FindMessageTypeByName("jaxmoe.Example")
    return message_factory.GetMessageClass(found)


def _field(name: str, number: int, kind: str, *, repeated: bool = False):
    own = {"type": "TYPE_MESSAGE", "type_name": kind} if kind[0] == "." else {}
    label = "LABEL_REPEATED" if repeated else "LABEL_OPTIONAL"
    return {"name": name, "number": number, "label": label, "type": kind, **own}


# The part of the schema that holds bytes; numbers are skipped as unknown fields.
_SCHEMA = {
    "name": "jaxmoe/example.proto",
    "package": "jaxmoe",
    "syntax": "proto3",
    "message_type": [
        {
            "name": "BytesList",
            "field": [_field("value", 1, "TYPE_BYTES", repeated=True)],
        },
        {"name": "Feature", "field": [_field("bytes_list", 1, ".jaxmoe.BytesList")]},
        {
            "name": "Features",
            "field": [
                _field("feature", 1, ".jaxmoe.Features.FeatureEntry", repeated=True)
            ],
            "nested_type": [
                {
                    "name": "FeatureEntry",
                    "field": [
                        _field("key", 1, "TYPE_STRING"),
                        _field("value", 2, ".jaxmoe.Feature"),
                    ],
                    "options": {"map_entry": True},
                }
            ],
        },
        {"name": "Example", "field": [_field("features", 1, ".jaxmoe.Features")]},
    ],
}


class ParquetTable:
    """Rows of tables with columns of these names; images as bytes, or as paths.

    A table cannot be read by single rows, so the columns are held in memory. A struct
    of `bytes` and `path`, as Hugging Face writes images, is taken for its bytes.
    """

    def __init__(self, files: list[str]):
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise ConfigError(
                f"{shown_path(files[0])} needs the package 'pyarrow', which is not"
                " installed. Run: pip install 'jaxmoe[data]'."
            ) from error
        self.left_out: dict[str, int] = {}
        self._tables = []
        for file in files:
            try:
                reader = parquet.ParquetFile(file)
                present = [n for n in NAMES if n in reader.schema_arrow.names]
                self._tables.append((file, reader.read(columns=present)))
            except (pyarrow.ArrowException, OSError) as error:
                raise mistake(
                    f"{shown_path(file)} cannot be read ({str(error)[:200]})",
                    "its ending says that it is a Parquet table",
                    "Give a whole Parquet file",
                ) from error
        self._rows = [
            (table, row)
            for table, (_, content) in enumerate(self._tables)
            for row in range(content.num_rows)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, index: int) -> str:
        table, row = self._rows[index]
        return f"{shown_path(self._tables[table][0])}, row {row}"

    def raw(self, index: int) -> Raw:
        number, row = self._rows[index]
        file, table = self._tables[number]
        fields = {
            name: table.column(name)[row].as_py()
            for name in table.column_names
            if name != "image"
        }
        if "image" not in table.column_names:
            return Raw(fields, None)
        image = table.column("image")[row].as_py()
        if isinstance(image, dict):
            image = image.get("bytes") or image.get("path")
        if isinstance(image, str):
            path = os.path.join(os.path.dirname(file), image)
            try:
                return Raw(fields, Blob(path, 0, os.stat(path).st_size))
            except OSError as error:
                reason = f"{shown_path(path)} cannot be read ({error.strerror})"
                raise BrokenRecord(reason) from error
        if image is not None and not isinstance(image, bytes):
            raise BrokenRecord(f"'image' is {str(image)[:40]!r}, not bytes or a path")
        return Raw(fields, image or None)
