"""What usually goes wrong with an outbox, a relay and an inbox, what Semel does instead, and which tests prove it.

The page of pitfalls is made from it. This module is only data.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Pitfall(NamedTuple):
    """What happens to those who make the mistake, and what Semel does instead."""

    effect: str
    instead: str
    proofs: tuple[str, ...]
    """``file::test``, below ``tests``."""


ADDING: Final = {
    "Events are collected on the session of an ORM and written at the commit": Pitfall(
        "An event of a savepoint that was rolled back is sent all the same.",
        "A message is inserted when it is added, in the caller's transaction, and is rolled back with it.",
        ("messaging/test_ordering.py::test_a_savepoint_takes_its_events_along",),
    ),
    "The position is taken before the stream is locked": Pitfall(
        "Two transactions of one stream commit in one order, and are sent in the other.",
        "The stream's row is locked first, then the insert takes its position.",
        (
            "messaging/test_ordering.py::test_positions_of_a_stream_grow_in_the_order_of_the_commits",
            "messaging/test_fresh_messages.py::test_positions_of_a_stream_grow_in_the_order_of_the_commits",
            "messaging/test_log.py::test_positions_of_a_stream_grow_in_the_order_of_the_commits",
        ),
    ),
    "Every transaction sends a NOTIFY": Pitfall(
        "PostgreSQL serialises the commits, and the throughput drops by half.",
        "One transaction at a time notifies. The relay also polls, less and less often while there is nothing to send.",
        (
            "transactional/test_outbox.py::test_only_one_transaction_at_a_time_notifies",
            "transactional/test_outbox.py::test_a_message_wakes_the_relay_that_waits",
            "core/test_relaying.py::test_it_polls_ever_more_rarely_until_a_wake_up",
        ),
    ),
}

SENDING: Final = {
    "The relay remembers its last position and asks for higher ones": Pitfall(
        "A lower position that commits late is never sent.",
        "In the queue, messages that were sent are deleted and the others are read again. In the log, the relay "
        "compares snapshots, not positions.",
        (
            "messaging/test_ordering.py::test_a_lower_position_that_commits_late_is_sent",
            "messaging/test_log.py::test_a_lower_position_that_commits_late_is_sent",
        ),
    ),
    "The relay sends what is older than the oldest running transaction, in the order of transaction numbers": Pitfall(
        "The second message of a stream may go before the first, and one open transaction anywhere in the server stops "
        "everything.",
        "The relay reads all that is visible, in the order of positions.",
        (
            "messaging/test_log.py::test_a_transaction_that_began_first_and_adds_last_is_sent_last",
            "messaging/test_log.py::test_a_long_transaction_elsewhere_does_not_make_reading_slower",
        ),
    ),
    "Two relays share the work by SKIP LOCKED": Pitfall(
        "Each gets some messages of a stream, and they arrive in any order.",
        "A stream belongs to a lane, and a lane to one relay.",
        (
            "messaging/test_ordering.py::test_two_relays_do_not_share_a_stream",
            "messaging/test_relay_ops.py::test_relays_that_race_for_lanes_never_share_one",
        ),
    ),
    "A lease is trusted to stop a relay that was paused": Pitfall(
        "The relay wakes up and publishes a batch that its successor has sent already.",
        "A relay publishes only in the first two thirds of its lease, and cannot settle after it. Each message carries "
        "its sequence in the stream, so that a consumer can drop what goes backwards. [Leases](relays.md#leases) "
        "explains why Kafka's transactional ids are not used.",
        (
            "messaging/test_ordering.py::test_what_a_paused_relay_settles_late_changes_nothing",
            "messaging/test_relay_processes.py::test_stopped_for_longer_than_its_lease",
            "core/test_relaying.py::test_a_relay_that_was_paused_before_it_publishes_does_not_publish",
        ),
    ),
    "A transaction stays open while messages are sent": Pitfall(
        "A slow broker occupies a connection and keeps PostgreSQL from vacuuming.",
        "One short transaction before sending, one after it.",
        ("messaging/test_relay.py::test_no_transaction_is_open_while_messages_are_sent",),
    ),
    "Messages are deleted one by one, and found by reading from the beginning": Pitfall(
        "A tenth of the throughput; and while a long transaction is open, every batch reads all deleted rows again.",
        "One `DELETE` for a batch. In a backlog a relay continues from its last position, and looks back four times a "
        "second.",
        (
            "messaging/test_relay.py::test_rows_that_cannot_be_removed_yet_are_not_read_again_and_again",
            "core/test_relaying.py::test_it_reads_on_from_a_full_batch_and_looks_back_for_late_commits",
        ),
    ),
    "A broker that is down counts as a failed attempt": Pitfall(
        "After an outage, good messages are dead letters.",
        "A circuit breaker opens. Nothing counts until the broker is back.",
        (
            "messaging/test_relay.py::test_a_broker_that_is_down_burns_no_start_even_if_the_relay_dies_then",
            "core/test_relaying.py::test_a_broker_that_is_down_costs_no_attempt",
            "messaging/test_relay_processes.py::test_a_broker_that_is_down_for_a_while",
        ),
    ),
    "A replication slot is left to itself": Pitfall(
        "PostgreSQL keeps its log for a relay that does not run, and fills the disk.",
        "The relay warns, and `semel outbox`, a gauge and an alert show what the database retains, also while no relay "
        "runs. The mode can be changed at any time; messages that were not sent move to the queue.",
        (
            "messaging/test_log.py::test_what_the_database_keeps_is_watched",
            "messaging/test_log.py::test_switching_keeps_messages_and_their_order",
            "messaging/test_log.py::test_a_slot_that_is_gone_is_an_error_that_says_what_to_do",
        ),
    ),
}

APPLYING: Final = {
    "A message is marked as seen before its handler has committed": Pitfall(
        "If the handler fails, the message is lost.",
        "The id is inserted in the handler's transaction, before the handler runs.",
        (
            "transactional/test_inbox_rivals.py::test_marking_a_message_as_seen_before_the_handler_commits_loses_it",
            "transactional/test_inbox_rivals.py::test_a_handler_that_fails_runs_again",
        ),
    ),
    "A loop catches the error of a handler inside its transaction, and commits": Pitfall(
        "The id is stored without the effect, and the message is lost.",
        "The function runs inside a savepoint. If it raises, what it wrote and the id are undone.",
        ("transactional/test_inbox.py::test_a_call_that_raises_leaves_nothing_even_if_the_caller_commits",),
    ),
    "A lock that is held means that the message is a duplicate": Pitfall(
        "If the holder rolls back, nobody applies the message.",
        "Only a committed row is a proof. A second consumer waits for the first, or asks for the message again.",
        (
            "transactional/test_inbox_rivals.py::test_a_rival_waits_and_runs_if_the_first_is_rolled_back",
            "transactional/test_inbox_rivals.py::test_a_rival_that_does_not_wait_is_told_to_come_again",
        ),
    ),
    "The inbox knows the id of a message only": Pitfall(
        "Of two consumers of one event, the second one drops it.",
        "The key is the consumer and the id.",
        ("transactional/test_inbox.py::test_a_message_is_applied_once_by_each_consumer",),
    ),
    "What a handler sends gets a new id in every run, or is not sent for a duplicate": Pitfall(
        "The next service applies it twice, or never gets it.",
        "It goes through the outbox, in the same transaction, under an id that derives from the message.",
        (
            "messaging/test_consumer.py::test_what_a_handler_emits_has_the_same_id_in_every_run",
            "transactional/test_inbox.py::test_a_call_adds_messages_whose_ids_are_made_of_its_own",
        ),
    ),
    "The inbox forgets sooner than the broker, or than people redrive": Pitfall(
        "An old message is applied a second time.",
        "Such an inbox is refused when the consumer starts. Partitions by time are chosen by the id itself, a UUID of "
        "version 7, so an id is unique in all of them.",
        (
            "messaging/test_consumer.py::test_an_inbox_that_forgets_too_soon_is_refused",
            "messaging/test_inbox_by_time.py::test_an_inbox_is_divided_and_knows_what_it_knew",
        ),
    ),
}

GIVING_UP: Final = {
    "Attempts are counted when they end": Pitfall(
        "A message that kills its process is tried for ever.",
        "The start is recorded before the message is sent or applied.",
        (
            "messaging/test_relay_processes.py::test_a_message_that_kills_its_relay_reaches_the_dead_letters",
            "messaging/test_killed_consumers.py::test_every_message_is_applied_once_and_the_one_that_kills_is_given_up",
        ),
    ),
    "A poison message is dropped, and its stream goes on": Pitfall(
        "A payment is cancelled before it was made.",
        "You choose for each stream: block it, park the whole stream, or skip the message, which is recorded.",
        (
            "core/test_relaying.py::test_poison_follows_the_policy_of_its_stream",
            "messaging/test_consumer.py::test_a_stream_is_applied_in_order_and_parked_with_its_poison",
            "messaging/test_consumer.py::test_skip_goes_on_and_block_never_gives_up",
        ),
    ),
    "A redrive sends the same id into the broker's own dedup window": Pitfall(
        "The broker drops it without a word.",
        "The message keeps its id, and the broker gets the id together with the number of the redrive.",
        (
            "messaging/test_nats.py::test_attributes_are_headers_and_a_repeat_is_dropped_but_not_a_redrive",
            "messaging/test_sqs.py::test_a_repeat_is_dropped_but_not_a_redrive",
        ),
    ),
    "RabbitMQ's confirmation is taken for delivery": Pitfall(
        "It also confirms a message that no queue gets. A quorum queue without a dead-letter exchange drops a message "
        "at its delivery limit.",
        "Messages are `mandatory`, and a returned one counts as refused. A consumer warns of a queue that drops "
        "messages.",
        (
            "messaging/test_rabbitmq.py::test_a_message_that_no_queue_gets_is_refused_alone",
            "messaging/test_rabbitmq.py::test_a_queue_that_drops_messages_is_warned_of",
        ),
    ),
}

PITFALLS: Final = {
    "Adding a message": ADDING,
    "Sending": SENDING,
    "Applying": APPLYING,
    "Giving up and redriving": GIVING_UP,
}
