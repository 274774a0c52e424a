"""Who may say something to a bootstrap server, and whose answers are believed."""

from inferkit.kv_transfer.signature import HttpSignatures, Signer

SIGNER = Signer(secret=b"s", purpose="p")


def test_a_signature_is_of_its_parts_in_their_order() -> None:
    given = SIGNER.sign(b"ab", b"c")
    assert len(given) == 64
    assert SIGNER.is_valid(given, b"ab", b"c")
    for other in ([b"a", b"bc"], [b"abc"], [b"c", b"ab"], [b"ab", b"c", b""], []):
        assert not SIGNER.is_valid(given, *other)


def test_secret_and_purpose_decide() -> None:
    given = SIGNER.sign(b"x")
    assert not Signer(secret=b"t", purpose="p").is_valid(given, b"x")
    assert not Signer(secret=b"s", purpose="q").is_valid(given, b"x")
    for strange in ("", "0" * 64, given[:-1], given.upper(), "\udcff", "\N{SNOWMAN}" * 64):
        assert not SIGNER.is_valid(strange, b"x")


def test_without_a_secret_nothing_is_signed_and_all_is_believed() -> None:
    signer = Signer(secret=b"", purpose="p")
    assert not signer.is_on and SIGNER.is_on
    assert signer.sign(b"x") == ""
    assert signer.is_valid("anything", b"x")
    assert HttpSignatures(secret=b"").request_headers("GET", "/") == {}


def test_a_request_is_no_answer() -> None:
    signatures = HttpSignatures(secret=b"s")
    request = signatures.request_headers("GET", "/p", b"200")[HttpSignatures.HEADER]
    assert signatures.is_request_valid(request, "GET", "/p", b"200")
    assert not signatures.is_request_valid(request, "PUT", "/p", b"200")
    assert not signatures.is_answer_valid(request, "/p", 200, b"")
    answer = signatures.answer_headers("/p", 200, b"b")[HttpSignatures.HEADER]
    assert signatures.is_answer_valid(answer, "/p", 200, b"b")
    assert not signatures.is_answer_valid(answer, "/p", 503, b"b")
