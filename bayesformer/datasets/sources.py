"""Data sets that tasks use: their files with hashes of what these hold, and the official places to fetch them from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bayesformer.core.errors import unknown_name
from bayesformer.datasets import converting


@dataclass(frozen=True)
class Download:
    """Something on the web, with a hash of it where one was published ("md5:..."); else what is made of it decides."""

    url: str
    known_hash: str | None = None


@dataclass(frozen=True)
class DataFile:
    """One file of a data set, by its path in a data folder."""

    path: str
    sha256: str
    """of its content, unpacked: data packed in another way are the same data"""
    downloads: tuple[Download, ...]
    make: Callable[[Sequence[bytes]], bytes] | None = None
    """from what was downloaded to the content; None: the download is the file"""


@dataclass(frozen=True)
class DataSource:
    """A data set: what it is, whose, under which licence, and its files."""

    name: str
    title: str
    licence: str
    files: tuple[DataFile, ...]

    def file(self, path: str) -> DataFile:
        """The file of this path in a data folder."""
        return next(file for file in self.files if file.path == path)


def _idx(folder: str, base: str, rows: dict[str, tuple[str, str]]) -> tuple[DataFile, ...]:
    """Files of images and labels: by name the hash of the content and the published MD5 of the download."""
    return tuple(
        DataFile(f"{folder}/{name}.gz", sha256, (Download(f"{base}/{name}.gz", f"md5:{md5}"),))
        for name, (sha256, md5) in rows.items()
    )


MNIST = DataSource(
    "mnist",
    "MNIST: handwritten digits, 60,000 + 10,000 (LeCun, Cortes & Burges)",
    "usually given as CC BY-SA 3.0",
    _idx(
        "mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        {
            "train-images-idx3-ubyte": (
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            ),
            "train-labels-idx1-ubyte": (
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "d53e105ee54ea40749a09fcbcd1e9432",
            ),
            "t10k-images-idx3-ubyte": (
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "9fb629c4189551a2d022fa330f9573f3",
            ),
            "t10k-labels-idx1-ubyte": (
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
        },
    ),
)

FASHION = DataSource(
    "fashion_mnist",
    "Fashion-MNIST: articles of clothing, 60,000 + 10,000 (Xiao et al. 2017)",
    "MIT",
    _idx(
        "fashion_mnist",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        {
            "train-images-idx3-ubyte": (
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            ),
            "train-labels-idx1-ubyte": (
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "25c81989df183df01b3e8a0aad5dffbe",
            ),
            "t10k-images-idx3-ubyte": (
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "bef4ecab320f06d8554ea6380940ec79",
            ),
            "t10k-labels-idx1-ubyte": (
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
        },
    ),
)

_UD = "https://raw.githubusercontent.com/UniversalDependencies/UD_English-EWT"
UD_ENGLISH = DataSource(
    "ud_english",
    "Universal Dependencies English v1.2: 16,622 sentences with lemmas and tags (Silveira et al. 2014)",
    "CC BY-SA 4.0",
    (
        # Version 1.3 with its one systematic change of tags undone, which is version 1.2 up to 16 counts in 254,830.
        DataFile(
            "ud_english/v1.2-train.tsv.xz",
            "40639dc53b91a74b435dc761f3275255c91eefb31144025b84132e556a1ea189",
            (
                Download(
                    f"{_UD}/r1.3/en-ud-train.conllu",
                    "sha256:7bb2f81e65b4fdf10bbf78afc7553a02fb35580a5554625014738e9585196104",
                ),
            ),
            converting.version_1_2,
        ),
        DataFile(
            "ud_english/v1.2-dev.tsv.xz",
            "4b338e62055aabd7a060f962acce2d87cb3363baa3bf672f7c3fb06abac3d29e",
            (Download(f"{_UD}/r1.2/en-ud-dev.conllu"),),
            converting.four_columns,
        ),
        DataFile(
            "ud_english/v1.2-test.tsv.xz",
            "ccac9c8768aa18852a8c1ef7116013adec7db82ef50ca2c3d8883810b475bce6",
            (Download(f"{_UD}/r1.2/en-ud-test.conllu"),),
            converting.four_columns,
        ),
    ),
)

_IMDB = Download(
    "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz", "md5:7c2ac02c03563afcf9b574c7e56c153a"
)
IMDB = DataSource(
    "imdb",
    "IMDB movie reviews: 25,000 + 25,000, positive or negative (Maas et al. 2011)",
    "none stated; for research",
    (
        DataFile(
            "imdb/train.jsonl.xz",
            "ab94eac717b84e5f3dd5b7e92100e9fe5be5e15865b573b925130b0f6d914774",
            (_IMDB,),
            converting.train_reviews,
        ),
        DataFile(
            "imdb/test.jsonl.xz",
            "7cb61bfb8eaa8abbf0d97c652dc0441a118436aa0df70099450d9d2b89b6e6ca",
            (_IMDB,),
            converting.test_reviews,
        ),
    ),
)

_PLANETOID = "https://github.com/kimiyoung/planetoid/raw/master/data"
PLANETOID = DataSource(
    "planetoid",
    "Citation graphs Cora, Citeseer and Pubmed (Yang, Cohen & Salakhutdinov 2016)",
    "MIT",
    tuple(
        DataFile(
            f"planetoid/{name}.npz",
            sha256,
            tuple(Download(f"{_PLANETOID}/ind.{name}.{part}") for part in converting.PLANETOID_PARTS),
            converting.citation_graph,
        )
        for name, sha256 in {
            "cora": "b1539f6ceba73b32f52b4e701ffbd29a2309b760b0d2c8af4351ed4270afd35d",
            "citeseer": "6b58ce88b4c3a367a07d09bb29950f7f543ee2a091640bc91030af6973d1b8a7",
            "pubmed": "02a41cc66a09054541da904785c17bb1eff4f7a7335d7cc5b27f6d6a91f727bd",
        }.items()
    ),
)

SOURCES: dict[str, DataSource] = {source.name: source for source in (MNIST, FASHION, UD_ENGLISH, IMDB, PLANETOID)}


def source_of(name: str) -> DataSource:
    """The data set of this name; - and _ are the same."""
    known = name.replace("-", "_")
    if known not in SOURCES:
        raise unknown_name("data set", name, SOURCES)
    return SOURCES[known]
