//! Processes that meet: equal scopes, and proofs that both ends can read the home.

use std::collections::HashMap;

use arrow::datatypes::{DataType, Field};

use super::peers::say;
use super::*;

#[test]
fn other_content_plans_selections_and_columns_have_other_addresses() {
    let ends = Ends::new();
    let first = ends.scope().address();
    assert_eq!(first, ends.scope().address());
    let other_content = [9; 32];
    let narrow: SchemaRef = Arc::new(ends.schema.project(&[0]).unwrap());
    let int32 = ends.schema.field(0).clone().with_data_type(DataType::Int32);
    let other_type: SchemaRef = Arc::new(Schema::new(vec![int32, ends.schema.field(1).clone()]));
    let plan = "cd".repeat(32).parse::<PlanId>().unwrap();
    let mut others = [
        Scope { content: &other_content, ..ends.scope() }.address(),
        Scope { plan, ..ends.scope() }.address(),
        Scope { selection: "id > 3".to_owned(), ..ends.scope() }.address(),
        Scope { groups: 65, ..ends.scope() }.address(),
        Scope { schema: &narrow, ..ends.scope() }.address(),
        Scope { schema: &other_type, ..ends.scope() }.address(),
    ];
    others.sort();
    assert!(others.windows(2).all(|pair| pair[0] != pair[1]), "{others:?}");
    assert!(!others.contains(&first));
}

/// A schema with one list, whose items have this metadata.
fn listed(metadata: impl IntoIterator<Item = (String, String)>, is_nullable: bool) -> SchemaRef {
    let metadata: HashMap<String, String> = metadata.into_iter().collect();
    let item = Field::new("item", DataType::Int32, is_nullable).with_metadata(metadata);
    Arc::new(Schema::new(vec![Field::new("list", DataType::List(Arc::new(item)), false)]))
}

#[test]
fn nested_metadata_names_a_scope_in_any_order() {
    let ends = Ends::new();
    let pairs = || (0..32).map(|number| (format!("key {number}"), format!("value {number}")));
    let of = |schema: &SchemaRef| {
        let scope = Scope { schema, ..ends.scope() };
        (scope.address(), scope.key())
    };
    let first = of(&listed(pairs(), true));
    // Each map has an order of its own.
    for _ in 0..8 {
        assert_eq!(of(&listed(pairs().rev(), true)), first);
    }
    let last = ("key 31".to_owned(), "another value".to_owned());
    assert_ne!(of(&listed(pairs().take(31).chain([last]), true)), first);
    assert_ne!(of(&listed(pairs().take(31), true)), first);
    assert_ne!(of(&listed(pairs(), false)), first);
}

#[test]
fn the_key_differs_from_the_address_and_between_snapshots() {
    let ends = Ends::new();
    let key = ends.scope().key();
    assert_eq!(key, ends.scope().key());
    assert!(!ends.scope().address().to_string_lossy().contains(&hex::encode(key)));
    assert_ne!(key, Scope { content: &[9; 32], ..ends.scope() }.key());
}

#[tokio::test]
async fn a_process_that_cannot_read_the_home_gets_no_rows() {
    let node = Ends::new().end();
    let decoded = AtomicU32::new(0);
    read(&node, 0, &decoded).await;
    // Without the first proof.
    let line = Line::connect(&node.address).await.unwrap();
    say(&line, Kind::Get, 0, None).await;
    assert!(within(DEADLINE, line.receive()).await.is_err());
    // With the key of another home.
    let line = Line::connect(&node.address).await.unwrap();
    assert!(proof::introduce(&line, &Key::new(&[7; 32]), DEADLINE).await.is_err());
    // With a false proof, and with that of the server.
    for is_sent_back in [false, true] {
        let line = Line::connect(&node.address).await.unwrap();
        line.send_halves(DEADLINE, Kind::Hello, [[5; 32]; 2]).await.unwrap();
        let reply = within(DEADLINE, line.receive()).await.unwrap();
        assert_eq!(reply.kind, Kind::ServerProof);
        let false_proof = if is_sent_back { reply.halves[1] } else { [5; 32] };
        line.send_halves(DEADLINE, Kind::ClientProof, [false_proof; 2]).await.unwrap();
        // The server may have closed the connection already.
        line.send(DEADLINE, Kind::Get, 0, None).await.ok();
        assert!(within(DEADLINE, line.receive()).await.is_err(), "sent back: {is_sent_back}");
    }
    assert_eq!(read(&node, 0, &decoded).await, batch(0));
    assert_eq!(decoded.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn rows_of_a_server_that_cannot_read_the_home_are_not_taken() {
    let node = Ends::new().end();
    let listener = Listener::bind(&node.address).unwrap();
    let decoded = AtomicU32::new(0);
    let lying = async {
        let line = within(DEADLINE, listener.accept()).await.unwrap();
        let hello = within(DEADLINE, line.receive()).await.unwrap();
        assert_eq!(hello.kind, Kind::Hello);
        line.send_halves(DEADLINE, Kind::ServerProof, [[5; 32]; 2]).await.unwrap();
        let file = memory::encode(&batch(4)).unwrap();
        line.send(DEADLINE, Kind::Hit, 3, Some(&file)).await.ok();
        assert!(within(DEADLINE, line.receive()).await.is_err(), "it asks");
    };
    let (found, ()) = tokio::join!(read(&node, 3, &decoded), lying);
    assert_eq!(found, batch(3));
    assert_eq!(decoded.load(Ordering::SeqCst), 1);
    assert!(!node.may_ask(&wanted(4)));
}
