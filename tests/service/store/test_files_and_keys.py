import pytest

from service.jobs import File, new_file_id
from service.store import NotFound, Store


def sample_file(created_at: float) -> File:
    return File(
        id=new_file_id(),
        name="../../etc/passwd",
        purpose="fine-tune",
        bytes=12,
        sha256="0" * 64,
        lines=3,
        created_at=created_at,
        created_by=None,
    )


def test_files_are_kept_listed_and_removed(store: Store) -> None:
    files = [sample_file(float(second)) for second in range(3)]
    for file in files:
        store.files.add(file)
    assert store.files.get(files[0].id) == files[0]
    page = store.files.page(limit=2)
    assert (page.items, page.has_more) == ([files[2], files[1]], True)
    rest = store.files.page(limit=2, after=page.cursor)
    assert (rest.items, rest.has_more) == ([files[0]], False)
    store.files.remove(files[0].id)
    for call in (store.files.get, store.files.remove):
        with pytest.raises(NotFound, match=files[0].id):
            call(files[0].id)
    assert store.files.page(limit=2, after=page.cursor).cursor is None


def test_a_key_is_accepted_until_it_is_revoked(store: Store) -> None:
    key = store.keys.add("laptop", "a" * 64)
    assert store.keys.add("another name", "a" * 64) == key
    assert store.keys.by_hash("a" * 64) == key
    assert store.keys.by_hash("b" * 64) is None
    assert store.keys.count() == 1
    store.keys.used(key.id)
    store.keys.revoke(key.id)
    assert store.keys.by_hash("a" * 64) is None
    assert store.keys.count() == 0
    (listed,) = store.keys.listed()
    assert listed.last_used_at is not None
    assert listed.revoked_at is not None
    for call in (store.keys.revoke, store.keys.used):
        with pytest.raises(NotFound, match="key-nowhere"):
            call("key-nowhere")


def test_a_revoked_key_stays_revoked_since_the_first_time(store: Store) -> None:
    key = store.keys.add("laptop", "a" * 64)
    revoked, accepted_until_now = store.keys.revoke(key.id)
    assert (revoked.id, accepted_until_now) == (key.id, True)
    assert revoked.revoked_at is not None
    assert store.keys.revoke(key.id) == (revoked, False)
    assert store.keys.add("laptop", "a" * 64) == revoked


def test_no_record_shows_a_secret(store: Store) -> None:
    assert "a" * 64 not in repr(store.keys.add("laptop", "a" * 64))
