"""Two transactions on Apache Kafka: one is aborted, one is committed."""
import json
import sys

from confluent_kafka import Producer

bootstrap, topic = sys.argv[1:3]
producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": topic})
producer.init_transactions(30)
for ids, finish in [(range(0, 100), producer.abort_transaction), (range(100, 200), producer.commit_transaction)]:
    producer.begin_transaction()
    for i in ids:
        producer.produce(topic, json.dumps({"id": i}).encode())
    producer.flush(30)
    finish(30)
print("committed 100, aborted 100")
