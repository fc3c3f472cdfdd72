# SPDX-License-Identifier: Apache-2.0
"""Loaders and files of the tests of data."""

import dataclasses

import pytest

from jaxmoe.data.loader import Loader
from tests.data import own_files
from tests.data.own_files import DATA, KINDS, MODEL


@pytest.fixture
def make_loader():
    """Makes loaders whose threads end with the test, and that tell nobody."""
    loaders = []

    def make(source, *, model=MODEL, microbatches=1, rows=None, told=None, **options):
        data = dataclasses.replace(DATA, source=source, **options)
        loader = Loader(data, model=model, microbatches=microbatches, rows=rows)
        loader.report = ([] if told is None else told).append
        loaders.append(loader)
        return loader

    yield make
    for loader in loaders:
        loader.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Twelve records in every kind of file: source by kind."""
    folder = tmp_path_factory.mktemp("own")
    rows = own_files.records(12)
    return {kind: own_files.write(folder / kind, kind, rows) for kind in KINDS}
