"""Ship each order once, even if it is requested many times. Run it twice: the second run ships nothing."""

import sys

from semel import INJECTED, Operation, Semel, SQLiteStore

guard = Semel(SQLiteStore(sys.argv[1] if len(sys.argv) > 1 else "orders.db"))


@guard.once(key="order", operation="ship", ttl="7d")
def ship(order: str, address: str, op: Operation = INJECTED) -> dict[str, str]:
    print(f"shipping {order} to {address}")
    # The same in every attempt: send it to the carrier, so that it can tell a retry from a second parcel.
    return {"order": order, "parcel": op.derive("parcel")}


if __name__ == "__main__":
    with guard:
        first = ship("A-1", "Rome")
        again = ship("A-1", "Rome")  # a replay: nothing is printed
        assert again == first
        ship("A-2", "Ostia")
        print("parcels:", first["parcel"], ship("A-2", "Ostia")["parcel"])
