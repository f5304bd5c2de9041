"""Deletes all records of a topic, as retention does."""
import sys

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

bootstrap, topic = sys.argv[1:3]
admin = AdminClient({"bootstrap.servers": bootstrap})
partitions = [TopicPartition(topic, number) for number in admin.list_topics(topic, 30).topics[topic].partitions]
ends = admin.list_offsets({partition: OffsetSpec.latest() for partition in partitions})
end_of = {partition.partition: future.result(30).offset for partition, future in ends.items()}
deleted = admin.delete_records([TopicPartition(topic, number, end) for number, end in end_of.items()])
for partition, future in deleted.items():
    low = future.result(30).low_watermark
    assert low == end_of[partition.partition], (partition, low, end_of)
print(f"deleted all: {end_of}")
