"""confluent-kafka against the embedded broker: produce, consume, compare."""
import sys

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

bootstrap = sys.argv[1]
N = 5_000
PARTITIONS = 3

admin = AdminClient({"bootstrap.servers": bootstrap})
admin.create_topics([NewTopic("from-python", num_partitions=PARTITIONS, replication_factor=1)])["from-python"].result(10)
assert "from-python" in admin.list_topics(timeout=10).topics

delivered = []


def on_delivery(error, message):
    if error is not None:
        raise KafkaException(error)
    delivered.append((message.partition(), message.offset()))


for codec in ["none", "gzip", "snappy", "lz4"]:
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "compression.type": codec, "linger.ms": 5})
    for i in range(N):
        producer.produce("from-python", key=f"{codec}-{i}", value=f"{codec} value {i}".encode(), headers={"codec": codec}, on_delivery=on_delivery)
        producer.poll(0)
    assert producer.flush(30) == 0
assert len(delivered) == 4 * N == len(set(delivered)), len(delivered)

consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "unused", "enable.auto.commit": False, "enable.partition.eof": False})
consumer.assign([TopicPartition("from-python", p, OFFSET_BEGINNING) for p in range(PARTITIONS)])
ends = {p: consumer.get_watermark_offsets(TopicPartition("from-python", p), timeout=10)[1] for p in range(PARTITIONS)}
assert sum(ends.values()) == 4 * N, ends

seen = {}
last = {p: -1 for p in range(PARTITIONS)}
while len(seen) < 4 * N:
    message = consumer.poll(10)
    assert message is not None, f"nothing more after {len(seen)} records"
    if message.error():
        raise KafkaException(message.error())
    assert message.offset() == last[message.partition()] + 1, (message.partition(), message.offset())
    last[message.partition()] = message.offset()
    codec, i = message.key().decode().rsplit("-", 1)
    assert message.value() == f"{codec} value {i}".encode()
    assert message.headers() == [("codec", codec.encode())]
    seen[message.key()] = seen.get(message.key(), 0) + 1
assert all(n == 1 for n in seen.values())

# By timestamp: an offset in the middle is found again through the time of its record.
consumer.assign([TopicPartition("from-python", 0, ends[0] // 2)])
middle = consumer.poll(10)
found = consumer.offsets_for_times([TopicPartition("from-python", 0, middle.timestamp()[1])], timeout=10)[0]
assert 0 <= found.offset <= middle.offset(), found
consumer.close()
print(f"{len(seen)} records, each once")
