"""A DNS server for the names of the cluster's Services, since the lab has no CoreDNS.

`python3 names.py API ADDRESS DOMAIN`: answers A for NAME.NAMESPACE.svc.DOMAIN. A headless Service has the addresses of
its pods, a ready one's only unless the Service publishes the others too. Every answer asks the API server, so none
is old. Other names do not exist.
"""

import json
import socketserver
import ssl
import struct
import sys
import urllib.request

API, ADDRESS, DOMAIN = sys.argv[1:4]
A = 1
NO_ERROR, SERVER_FAILURE, NO_SUCH_NAME = 0, 2, 3
TRUST = ssl._create_unverified_context()


def get(path):
    """An object of the API server, None where it does not exist."""
    request = urllib.request.Request(f"{API}{path}", headers={"Authorization": "Bearer lab"})
    try:
        with urllib.request.urlopen(request, timeout=5, context=TRUST) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def addresses(name):
    """IPv4 addresses of a name; None when it does not exist."""
    labels = name.lower().rstrip(".").removesuffix("." + DOMAIN).split(".")
    if not name.lower().rstrip(".").endswith("." + DOMAIN) or labels[-1] != "svc" or len(labels) != 3:
        return None
    service, namespace = labels[:2]
    found = get(f"/api/v1/namespaces/{namespace}/services/{service}")
    if found is None:
        return None
    cluster_ip = found["spec"].get("clusterIP")
    if cluster_ip and cluster_ip != "None":
        return [cluster_ip]
    selector = f"kubernetes.io/service-name={service}"
    slices = get(f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?labelSelector={selector}")
    return sorted({
        address
        for part in slices["items"]
        for endpoint in part.get("endpoints") or []
        if endpoint["conditions"].get("ready", True)
        for address in endpoint["addresses"]
    })


def question(packet):
    """Name, type and the end of the first question."""
    labels, at = [], 12
    while packet[at]:
        length = packet[at]
        if length > 63:
            raise ValueError("a compressed name in a question")
        labels.append(packet[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    return ".".join(labels), struct.unpack(">H", packet[at + 1 : at + 3])[0], at + 5


def answer(packet):
    name, kind, end = question(packet)
    try:
        found = addresses(name)
        code = NO_SUCH_NAME if found is None else NO_ERROR
    except OSError:
        found, code = None, SERVER_FAILURE
    records = (found or [])[:20] if kind == A else []
    # An authoritative answer of a server that does not ask others.
    head = packet[:2] + struct.pack(">HHHHH", 0x8580 | code, 1, len(records), 0, 0)
    body = b"".join(
        struct.pack(">HHHIH", 0xC00C, A, 1, 1, 4) + bytes(map(int, address.split("."))) for address in records
    )
    return head + packet[12:end] + body


class Handler(socketserver.BaseRequestHandler):
    def handle(self):
        packet, socket = self.request
        try:
            socket.sendto(answer(packet), self.client_address)
        except (ValueError, IndexError, struct.error, UnicodeDecodeError) as error:
            print(f"names: a packet from {self.client_address[0]} was no question: {error}", flush=True)


socketserver.ThreadingUDPServer.daemon_threads = True
socketserver.ThreadingUDPServer((ADDRESS, 53), Handler).serve_forever()
