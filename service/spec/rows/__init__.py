"""Rows of training files: how they are stored, the formats they come in, what they say.

Service and workers read files with this one code, so that what an upload accepts a job can read.
"""

from service.spec.rows.faults import FileFault, RowFault
from service.spec.rows.formats import FORMATS, Format, format_of, parse_row
from service.spec.rows.kinds import check_format
from service.spec.rows.reading import RawRow, RowError, RowFile
from service.spec.rows.shapes import (
    Conversation,
    Kind,
    Labelled,
    PlainText,
    Preference,
    Row,
    Text,
    VerifiablePrompt,
    kind_of_row,
)

__all__ = [
    "FORMATS",
    "Conversation",
    "FileFault",
    "Format",
    "Kind",
    "Labelled",
    "PlainText",
    "Preference",
    "RawRow",
    "Row",
    "RowError",
    "RowFault",
    "RowFile",
    "Text",
    "VerifiablePrompt",
    "check_format",
    "format_of",
    "kind_of_row",
    "parse_row",
]
