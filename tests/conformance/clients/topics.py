"""Topics of Apache Kafka as its administrators and producers change them: ``topics.py BOOTSTRAP COMMAND TOPIC …``."""
import json
import sys
import time

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

DEADLINE_S = 60
bootstrap, command, topic, *arguments = sys.argv[1:]
admin = AdminClient({"bootstrap.servers": bootstrap})


def done(futures):
    for future in futures.values():
        future.result(DEADLINE_S)


def until(what, condition):
    begun = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() < begun + DEADLINE_S, what
        time.sleep(0.1)
    return found


def partitions():
    found = admin.list_topics(timeout=DEADLINE_S).topics.get(topic)
    return 0 if found is None or found.error is not None else len(found.partitions)


def produce(producer, partition, first, count):
    for i in range(first, first + count):
        producer.produce(topic, json.dumps({"id": i}).encode(), key=str(i % 100).encode(), partition=partition)
    assert producer.flush(DEADLINE_S) == 0


def records(partition):
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "topics", "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, partition, 0)])
    found = 0
    while (message := consumer.poll(DEADLINE_S)) is not None and message.error() is None:
        found += 1
    consumer.close()
    return found


if command == "create":
    config = dict(setting.split("=") for setting in arguments[1:])

    def create():
        try:
            done(admin.create_topics([NewTopic(topic, int(arguments[0]), 1, config=config)]))
        except KafkaException as error:
            # A deleted topic of that name is not gone yet.
            assert error.args[0].name() == "TOPIC_ALREADY_EXISTS", error
            return False
        return True

    until(f"topic {topic} is created", create)
    until(f"topic {topic} is there", partitions)
elif command == "delete":
    done(admin.delete_topics([topic], operation_timeout=DEADLINE_S))
    until(f"topic {topic} is gone", lambda: partitions() == 0)
elif command == "add":
    wanted = int(arguments[0])
    done(admin.create_partitions([NewPartitions(topic, wanted)]))
    until(f"topic {topic} has {wanted} partitions", lambda: partitions() == wanted)
elif command == "produce":
    partition, first, count = map(int, arguments)
    produce(Producer({"bootstrap.servers": bootstrap}), partition, first, count)
elif command == "remove":
    # As retention does: the records before an offset.
    partition, offset = map(int, arguments)
    done(admin.delete_records([TopicPartition(topic, partition, offset)]))
elif command == "hold":
    # A transaction that stays open until a line arrives.
    partition, first, count = map(int, arguments)
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": "held"})
    producer.init_transactions(DEADLINE_S)
    producer.begin_transaction()
    produce(producer, partition, first, count)
    print("open", flush=True)
    sys.stdin.readline()
    producer.commit_transaction(DEADLINE_S)
elif command == "compacted":
    most = int(arguments[0])
    until(f"topic {topic} is compacted", lambda: records(0) <= most)
else:
    raise SystemExit(f"no command {command}")
