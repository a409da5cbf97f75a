from __future__ import annotations

import threading
from pathlib import Path

import pytest

from nep.checkpoint.folder_board import FolderBoard
from nep.testing.memory_board import MemoryBoard


def test_it_answers_as_the_store_does(tmp_path: Path) -> None:
    boards = [FolderBoard(tmp_path / "board"), MemoryBoard()]
    answers = [
        [
            board.get("a/b"),
            board.exists("a/b"),
            board.compare_and_set("a/b", "", "1"),
            board.compare_and_set("a/b", "", "2"),
            board.compare_and_set("a/b", "3", "2"),
            board.compare_and_set("a/b", "1", "2"),
            board.compare_and_set("a/b", "1", "3"),
            board.compare_and_set("a/b", "2", "3"),
            board.get("a/b"),
            board.set("c", "x"),
            board.set("c", "y"),
            board.get("c"),
            board.exists(["a/b", "c"]),
            board.exists(["a/b", "d"]),
            board.compare_and_set("e", "1", "2"),
            board.add("n", 0),
            board.add("n", 1),
            board.add("n", 1),
            board.add("n", 0),
        ]
        for board in boards
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("expected", ["", "before"])
def test_one_of_many_writes(tmp_path: Path, expected: str) -> None:
    board = FolderBoard(tmp_path)
    if expected:
        board.set("key", expected)
    found: list[str] = []
    start = threading.Barrier(8)

    def act(slot: int) -> None:
        start.wait()
        found.append(FolderBoard(tmp_path).compare_and_set("key", expected, str(slot)))

    threads = [threading.Thread(target=act, args=(slot,)) for slot in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and set(found) == {board.get("key")}
