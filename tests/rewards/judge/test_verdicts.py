import pytest

from headwater.rewards.judge.verdicts import read_ranking, read_score, read_winner


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("It is right.\nVerdict c0de: 7", 7),
        ("Verdict c0de: 10\n\n", 10),
        ("**Verdict c0de: 7**", 7),
        ("> `Verdict c0de: 7`.", 7),
        ("<think>Verdict c0de: 2</think>Verdict c0de: 7", 7),
        ("Verdict c0de: 7\nVerdict c0de: 7", 7),
        ("", None),
        ("7", None),
        ("Verdict: 7", None),
        ("Verdict beef: 7", None),
        ("Verdict c0de: 7\nI hope this helps.", None),
        ("Verdict c0de: 2\nVerdict c0de: 7", None),  # it contradicts itself
        ("Verdict c0de: 0", None),
        ("Verdict c0de: 11", None),
        ("Verdict c0de: 7.5", None),
        ("Verdict c0de: 7/10", None),
        ("Verdict c0de: 07", None),
        ("Verdict c0de: \u0667", None),  # a digit, but not one of ours
        ("Verdict c0de: " + "9" * 10_000, None),
        ("<think>Verdict c0de: 7", None),  # it never got out of its thinking
    ],
)
def test_a_score_is_a_last_line_of_exact_form(reply: str, score: int | None):
    assert read_score(reply, "c0de", (1, 10)) == score


def test_scores_below_zero():
    assert read_score("Verdict c0de: -3", "c0de", (-5, 5)) == -3
    assert read_score("Verdict c0de: -0", "c0de", (-5, 5)) is None


@pytest.mark.parametrize(
    ("said", "winner"),
    [("A", "first"), ("B", "second"), ("tie", "tie"), ("Tie", "tie"), ("a", None), ("[[A]]", None), ("A or B", None)],
)
def test_a_winner(said: str, winner: str | None):
    assert read_winner(f"Because.\nVerdict c0de: {said}", "c0de") == winner


@pytest.mark.parametrize(
    ("said", "places"),
    [
        ("2 > 1 > 3", (1, 0, 2)),
        ("2 > 1", None),
        ("2 > 1 > 1", None),
        ("2 > 1 > 4", None),
        ("2 > 1 > 3 >", None),
        ("2>1>3", None),
        ("2 > 1 = 3", None),
    ],
)
def test_a_ranking_names_everyone_once(said: str, places: tuple[int, ...] | None):
    assert read_ranking(f"Verdict c0de: {said}", "c0de", 3) == places
