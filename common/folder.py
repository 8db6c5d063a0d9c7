"""A folder of images and captions: what is in it, found once at the start.

Two kinds of fault, two exceptions (`common/errors.py`). What the start can know stops the run (UsageError): no images,
a broken line of metadata.jsonl, a listed image that is not there. What only reading can know spoils one sample
(Unreadable): it gets weight 0 and the run goes on. What is left out, replaced or ignored stands in `ImageFolder.notes`.
Nothing outside of the folder is read, whatever a symlink or a line of metadata.jsonl says.
"""

import json
import os
import posixpath
import re
import unicodedata
from collections import Counter, defaultdict

import numpy as np

from common.errors import Unreadable, UsageError
from common.picture import fit, read_bytes, read_image
from common.words import counted, named, printable

__all__ = ["ImageFolder", "fit", "printable", "read_image"]

# fmt: off
SUFFIXES = {
    ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif",
    ".jp2", ".ppm", ".pgm", ".pbm", ".ico",
}
NOT_READ = {
    ".heic", ".heif", ".jxl", ".psd", ".svg", ".tga", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".exr",
    ".hdr", ".pdf", ".eps",
}
# fmt: on
SYSTEM = {"thumbs.db", "desktop.ini", "__macosx", "@eadir", "__pycache__", "lost+found", "$recycle.bin"}
MAX_CAPTION = 10_000  # characters; CLIP reads 75 tokens


# ---------------------------------------------------------------------------------------------- captions


_CONTROL = re.compile("[\\x00-\\x08\\x0e-\\x1b\\x7f-\\x84\\x86-\\x9f]")  # those that split() does not take for spaces


def tidy(text):
    """One line, as the tokenizer should see it: no BOM, no CR, LF or other control character, single spaces.

    Lone surrogates (possible in JSON) become `?`, because tokenizers refuse them.
    """
    text = text.encode("utf-8", "replace").decode()
    return " ".join(_CONTROL.sub(" ", text).replace("\ufeff", "").split())


def decode_caption(data):
    """Bytes of a caption file -> (text, how it was read if not as UTF-8, else None)."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace"), "UTF-16"
    try:
        return data.decode("utf-8"), None
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
    # Other characters beyond ASCII that did decode show that it is UTF-8 with a damaged spot.
    if any(c > "\x7f" and c != "\ufffd" for c in text):
        return text, "damaged UTF-8"
    return data.decode("cp1252", "replace"), "Windows-1252"


def _caption(text, name, odd):
    """`text` tidied; what a reader of the folder would not expect is noted under `name`."""
    clean = tidy(text)
    if not clean:
        odd["empty captions"].append(name)
    if _CONTROL.search(text):
        odd["captions with control characters, which became spaces"].append(name)
    if len(clean) > MAX_CAPTION:
        odd[f"captions longer than {MAX_CAPTION} characters, cut there"].append(name)
    return clean[:MAX_CAPTION].rstrip()


def _metadata_lines(path):
    """Yield (line number, file name, text) of a metadata.jsonl, or raise UsageError with the file and the line."""
    try:
        data = read_bytes(path)
    except Unreadable as error:
        raise UsageError(f"{printable(path)}: {error}") from error
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(f"{printable(path)} is UTF-16; save it as UTF-8")
    # Cut as bytes: as text, splitlines() would also cut at U+2028 and its like, which JSON strings may hold.
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        if line.strip():
            try:
                yield number, *_one_line(line)
            except (ValueError, TypeError, RecursionError) as error:
                raise UsageError(f"{printable(path)} line {number}: {printable(error)}") from error


def _one_line(line):
    """b'{"file_name": "0.png", "text": "a cat"}' -> ("0.png", "a cat"), or an error that says what is wrong."""
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_no_twins)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}, column {error.colno})") from error
    if not isinstance(row, dict):
        raise TypeError('not an object; expected {"file_name": "…", "text": "…"}')
    if not {"file_name", "text"} <= row.keys():
        raise ValueError(f"has the keys {named(sorted(row), 8) or '(none)'}; expected file_name and text")
    for key in ("file_name", "text"):
        if not isinstance(row[key], str):
            raise TypeError(f'"{key}" is {printable(json.dumps(row[key]), 30)}; expected a string in quotes')
    # Empty, with a NUL or with half a UTF-16 pair, all possible in JSON: the system would refuse such a name obscurely.
    if not re.fullmatch("[^\0\ud800-\udc7f\udd00-\udfff]+", row["file_name"]):
        raise ValueError(f'"file_name" is {printable(json.dumps(row["file_name"]), 30)}; no file can have that name')
    return row["file_name"], row["text"]


def _no_twins(pairs):
    """JSON object from its pairs; a key that stands there twice would silently lose one of two captions."""
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f'the key "{printable(twice, 30)}" stands there twice')
    return row


def _spelled(name, known):
    """`name` as the folder spells it, or None. Windows' separators and the Mac's decomposed letters are accepted."""
    if name in known:
        return name
    slashed = name.replace("\\", "/")
    for way in (name, slashed, *(unicodedata.normalize(form, slashed) for form in ("NFC", "NFD"))):
        way = posixpath.normpath(way)
        if way in known:
            return way
    return None


# ---------------------------------------------------------------------------------------------- the folder


class Strings:
    """Many strings in one block of bytes.

    A list of a million strings is a million objects, and reading one writes its reference count: in forked workers that
    copies the pages they lie on, until every worker has its own copy of the list. A block of bytes is shared for good.
    """

    def __init__(self, texts):
        parts = [text.encode("utf-8", "surrogatepass") for text in texts]
        self.ends = np.cumsum([0] + [len(part) for part in parts], dtype=np.int64)
        self.block = b"".join(parts)

    def __len__(self):
        return len(self.ends) - 1

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.block[self.ends[index] : self.ends[index + 1]].decode("utf-8", "surrogatepass")


class ImageFolder:
    """The images under a folder, at any depth, sorted by name, each with its caption.

    Captions come from `metadata.jsonl` at the top of the folder, if there is one; it is then also the list of what is
    trained: images without a line are left out, an image with two lines is two samples. Else they come from NAME.txt
    beside each image (NAME = file name without its last suffix); an image without one has the empty caption.
    Whatever has an image's suffix and is not a folder is a sample; only reading it shows whether it can be trained on.
    `notes` holds one line for each kind of thing that was left out, replaced or ignored, with its count and some names.
    """

    def __init__(self, path):
        self.path, self.root = os.path.abspath(path), os.path.realpath(path)
        odd = defaultdict(list)  # what is odd -> names
        files = self._scan(odd)
        images = [name for name in files if _suffix(name) in SUFFIXES]
        listed = "metadata.jsonl" in files
        if not images and not listed:
            found = f"found {len(files)} files: {counted(files)}" if files else "it is empty"
            raise UsageError(f"no images in {printable(self.path)} ({found}). Read are {' '.join(sorted(SUFFIXES))}")
        samples = self._from_metadata(files, images, odd) if listed else self._from_text_files(files, images, odd)
        # Stable: several captions of one image stay in the order of their lines.
        samples.sort(key=lambda sample: sample[0])
        self._names, self._captions = Strings(name for name, _ in samples), Strings(text for _, text in samples)
        self.notes = [f"{what}: {len(names)} ({named(names)})" for what, names in odd.items() if names]

    def __len__(self):
        return len(self._names)

    def name(self, index):
        """Path relative to the folder, with forward slashes."""
        return self._names[index]

    def caption(self, index):
        return self._captions[index]

    def image(self, index):
        """PIL RGB, upright; or Unreadable."""
        path = os.path.join(self.path, self.name(index))
        if not self._inside(path):  # asked here and not only at the start: links can change under a long run
            raise Unreadable("outside of the folder, not read")
        return read_image(path)

    def first_readable(self):
        """Index of the first sample that can be trained on. A folder without any is an error, found before training."""
        reason = None
        for index in range(len(self)):
            try:
                self.image(index)
                return index
            except Unreadable as error:
                reason = reason or f"{printable(self.name(index))}: {error}"
        raise UsageError(f"none of the {len(self)} images in {printable(self.path)} can be read; the first: {reason}")

    def _inside(self, path):
        """Does the path, symlinks followed, stay within the folder?"""
        try:
            return os.path.commonpath([self.root, os.path.realpath(path)]) == self.root
        except (OSError, ValueError):  # a NUL in the name
            return False

    def _scan(self, odd):
        """Sorted names of all files but hidden and system ones, relative to the folder.

        Symlinked folders are not entered: those that lead inside would give every image twice, or without end; those
        that lead outside are not ours to read.
        """
        files, todo = [], [""]
        while todo:
            prefix = todo.pop()
            try:
                with os.scandir(os.path.join(self.path, prefix)) as entries:
                    for entry in entries:
                        self._sort_in(entry, prefix + entry.name, files, todo, odd)
            except OSError as error:
                if not prefix:
                    fault = "is a file, not a folder" if os.path.isfile(self.path) else error.strerror
                    raise UsageError(f"{printable(self.path)}: {fault}. Expected a folder of images") from error
                odd[f"folders that cannot be opened ({error.strerror}), left out"].append(prefix)
        for names in odd.values():
            names.sort()  # file systems list names in no order
        return sorted(files)

    def _sort_in(self, entry, name, files, todo, odd):
        """One directory entry: a file, a folder to enter, or something that is only counted."""
        if entry.name.startswith(".") or entry.name.lower() in SYSTEM:
            odd["hidden and system files and folders, ignored"].append(name)
        elif entry.is_dir(follow_symlinks=False):
            todo.append(name + "/")
        elif entry.is_symlink() and os.path.isdir(entry.path):
            odd["symlinked folders, not entered (copy what is in them, or give that folder as --data)"].append(name)
        else:
            files.append(name)
            if entry.is_symlink() and not self._inside(entry.path):
                odd["symlinks that lead outside of the folder, not read"].append(name)

    def _from_metadata(self, files, images, odd):
        """[(name, caption)] of every line of metadata.jsonl."""
        path, known, samples, missing = os.path.join(self.path, "metadata.jsonl"), set(files), [], []
        if not self._inside(path):
            raise UsageError(f"{printable(path)} is a symlink that leads outside of the folder; copy the file instead")
        for number, written, text in _metadata_lines(path):
            relative = os.path.relpath(written, self.path) if os.path.isabs(written) else written
            name = _spelled(relative, known)
            if name is None:
                # Not among the scanned files: hidden, behind a symlinked folder, outside, or not there at all.
                name = posixpath.normpath(relative.replace("\\", "/"))
                if not self._inside(os.path.join(self.path, name)):
                    odd["lines of metadata.jsonl that name an image outside of the folder, not read"].append(name)
                elif not os.path.isfile(os.path.join(self.path, name)):
                    missing.append((number, written))
            samples.append((name, _caption(text, name, odd)))
        if missing:
            raise UsageError(_missing_files(path, missing, files))
        if not samples:
            raise UsageError(f"{printable(path)} holds no line; expected one for each of the {len(images)} images")
        times = Counter(name for name, _ in samples)
        twice = [name for name, count in times.items() if count > 1]
        odd["images with several lines in metadata.jsonl, each line a sample"] += twice
        odd["images without a line in metadata.jsonl, left out"] += [name for name in images if name not in times]
        _note_rest([name for name in files if name not in times and name != "metadata.jsonl"], odd)
        return samples

    def _from_text_files(self, files, images, odd):
        """[(name, caption)] of every image, the caption from NAME.txt."""
        texts = {os.path.splitext(name)[0]: name for name in files if _suffix(name) == ".txt"}
        samples, used = [], set()
        for name in images:
            stem = _spelled(os.path.splitext(name)[0], texts)
            if stem is None:
                odd["images without a caption file, trained with the empty caption"].append(name)
            samples.append((name, "" if stem is None else self._text_file(texts[stem], odd)))
            used.add(texts.get(stem))
        # A list under a wrong name, and no caption anywhere: surely a slip. Without such a list it may be meant.
        lists = [name for name in files if _LIST_NAME.match(posixpath.basename(name))]
        if lists and used == {None}:
            raise UsageError(
                f"no captions for the {len(images)} images in {printable(self.path)}: {named(lists)} is not read. "
                "Expected metadata.jsonl at the top of the folder given as --data, or NAME.txt beside each image"
            )
        odd["caption files without an image, not used"] += [name for name in texts.values() if name not in used]
        _note_rest([name for name in files if _suffix(name) != ".txt"], odd)
        return samples

    def _text_file(self, name, odd):
        """The caption in a text file; empty, and noted, if it cannot be read."""
        path = os.path.join(self.path, name)
        try:
            if os.path.islink(path) and not self._inside(path):
                raise Unreadable("outside of the folder")
            text, read_as = decode_caption(read_bytes(path, most=1 << 24))
        except Unreadable as error:
            odd[f"caption files that cannot be read ({error}), taken as empty"].append(name)
            return ""
        if read_as:
            odd[f"caption files that are not UTF-8, read as {read_as}"].append(name)
        return _caption(text, name, odd)


_LIST_NAME = re.compile(r"meta.?data.*|captions?\..*|.*\.jsonl", re.IGNORECASE)


def _suffix(name):
    return os.path.splitext(name)[1].lower()


def _note_rest(names, odd):
    """Files that are neither trained on nor read as captions: by name where they look like images, else by count."""
    odd["images in a format that is not read (convert them to JPEG or PNG), left out"] += [
        name for name in names if _suffix(name) in NOT_READ
    ]
    others = [name for name in names if _suffix(name) not in NOT_READ | SUFFIXES]
    if others:
        odd[f"other files ({counted(others)}), ignored"] += others


def _missing_files(path, missing, files):
    """The message for lines of metadata.jsonl, [(number, file name)], without their image; suggests one that exists."""
    number, written = missing[0]
    base = posixpath.basename(written.replace("\\", "/")).lower()
    near = next((name for name in files if posixpath.basename(name).lower() == base), None)
    hint = f"; {printable(near)} exists" if near else ""
    more = f" (and {len(missing) - 1} more lines)" if missing[1:] else ""
    return (
        f"{printable(path)} line {number}: {printable(written)} not found{hint}{more}. "
        "Expected file_name relative to the folder of metadata.jsonl"
    )
