use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema};

use super::*;
use crate::dataset::{FileFormat, RowGroup};
use crate::feed::Coverage;

/// Files `part-0.parquet` …, each with row groups of these sizes, 100 bytes a row.
fn dataset(files: &[&[u64]]) -> Dataset {
    let schema = Schema::new(vec![Field::new("x", DataType::Int64, false)]);
    let files = files
        .iter()
        .enumerate()
        .map(|(i, groups)| DataFile {
            path: format!("train/part-{i}.parquet"),
            bytes: 1000 + i as u64,
            format: FileFormat::Parquet,
            row_groups: groups.iter().map(|&rows| RowGroup { rows, bytes: rows * 100 }).collect(),
            cuts: Vec::new(),
        })
        .collect();
    Dataset::new("/train".into(), Arc::new(schema), Vec::new(), files).unwrap()
}

fn options(seed: u64, batch_rows: usize, lanes: u32, window_rows: u64) -> PlanOptions {
    PlanOptions { source: "digits@v1".into(), seed, batch_rows, lanes, window_rows, ..PlanOptions::default() }
}

#[test]
fn golden_order_and_id_freeze_algorithm_version_1() {
    #[derive(serde::Deserialize)]
    struct Golden {
        lanes: u32,
        window_rows: u64,
        batch_rows: usize,
        seed: u64,
        id: String,
        places: Vec<(u64, usize, u64, u64)>,
    }
    let golden: Vec<Golden> = serde_json::from_str(include_str!("golden.json")).unwrap();
    assert!(golden.len() >= 3);
    for g in golden {
        let data = dataset(&[&[7, 0, 13], &[5000], &[40, 41, 42, 43]]);
        let plan = Plan::new(data, &options(g.seed, g.batch_rows, g.lanes, g.window_rows)).unwrap();
        assert_eq!(plan.id().to_string(), g.id);
        for (step, slot, row, epoch) in g.places {
            assert_eq!(plan.row_at(step, slot).unwrap(), (row, epoch), "step {step} slot {slot}");
        }
    }
}

#[test]
fn every_part_of_the_plan_is_in_its_id() {
    let base = || (dataset(&[&[100, 200], &[300]]), options(1, 60, 6, 64));
    let id = |(d, o): (Dataset, PlanOptions)| Plan::new(d, &o).unwrap().id();
    let first = id(base());
    assert_eq!(first, id(base()));
    let mut others = Vec::new();
    for change in [
        |o: &mut PlanOptions| o.seed = 2,
        |o: &mut PlanOptions| o.batch_rows = 66,
        |o: &mut PlanOptions| o.lanes = 3,
        |o: &mut PlanOptions| o.window_rows = 25,
        |o: &mut PlanOptions| o.source = "digits@v2".into(),
    ] {
        let (d, mut o) = base();
        change(&mut o);
        others.push(id((d, o)));
    }
    for files in [&[&[200u64, 100][..], &[300]][..], &[&[100, 200, 300]], &[&[100], &[200, 300]]] {
        others.push(id((dataset(files), base().1)));
    }
    assert!(!others.contains(&first));
    others.sort();
    others.dedup();
    assert_eq!(others.len(), 8);
}

#[test]
fn small_datasets_are_shuffled_whole_in_one_lane() {
    for rows in [1, 2, 5, 100, 1437] {
        let plan = Plan::new(dataset(&[&[rows]]), &PlanOptions::default()).unwrap();
        assert_eq!((plan.lanes(), plan.window_rows()), (1, rows));
        assert_eq!(plan.steps_for_epochs(1), rows.div_ceil(256));
    }
}

#[test]
fn lanes_divide_the_batch_and_windows_fill_lanes_evenly() {
    let million: Vec<u64> = vec![20_000; 50];
    let plan = Plan::new(dataset(&[&million]), &PlanOptions::default()).unwrap();
    assert_eq!(plan.lanes(), 32);
    assert_eq!(plan.window_rows(), 15_625);
    let odd = PlanOptions { batch_rows: 90, lanes: 64, ..PlanOptions::default() };
    assert_eq!(Plan::new(dataset(&[&million]), &odd).unwrap().lanes(), 45);
    let prime = PlanOptions { batch_rows: 97, ..odd };
    assert_eq!(Plan::new(dataset(&[&million]), &prime).unwrap().lanes(), 1);
}

#[test]
fn working_set_bound_reduces_window_then_lanes() {
    let groups: Vec<u64> = vec![20_000; 500]; // 2 MB each, 1 GB together
    for limit_mib in [64u64, 128, 256, 512] {
        let options = PlanOptions { working_set_bytes_max: limit_mib << 20, ..Default::default() };
        let plan = Plan::new(dataset(&[&groups]), &options).unwrap();
        assert!(plan.working_set_bytes() <= limit_mib << 20, "{limit_mib}: {plan:?}");
        assert!(plan.window_rows() >= 2000);
        assert!(plan.lanes() >= limit_mib / 16, "{limit_mib}: {} lanes", plan.lanes());
    }
}

#[test]
fn row_groups_that_cannot_fit_are_read_in_parts() {
    // Three row groups of 300 MB under the default bound of 512 MiB.
    let data = dataset(&[&[3_000_000, 0], &[3_000_000, 3_000_000]]);
    let plan = Plan::new(data.clone(), &PlanOptions::default()).unwrap();
    assert!(plan.has_parts());
    assert!(plan.working_set_bytes() <= 512 << 20, "{} bytes", plan.working_set_bytes());
    assert!(plan.lanes() >= 4, "{} lanes", plan.lanes());
    assert!(plan.window_rows() >= 2_000, "{} rows", plan.window_rows());
    // The first batch does not consist of neighbors: it comes from many places of the dataset.
    let mut places: Vec<u64> = (0..256).map(|slot| plan.row_at(0, slot).unwrap().0 / 100_000).collect();
    places.sort_unstable();
    places.dedup();
    assert!(places.len() >= 8, "{places:?}");
    for row in [0, 2_999_999, 3_000_000, 5_123_456, 8_999_999] {
        let (step, slot) = plan.slot_of(2, row).unwrap();
        assert_eq!(plan.row_at(step, slot).unwrap(), (row, 2));
        let address = plan.address_of(row).unwrap();
        assert_eq!(u64::from(address.row), row % 3_000_000, "{address:?}");
    }
    let text = serde_json::to_string(&plan).unwrap();
    let back: Plan = serde_json::from_str(&text).unwrap();
    assert_eq!((back.id(), back.row_at(77, 5).unwrap()), (plan.id(), plan.row_at(77, 5).unwrap()));
    // A larger memory bound needs no parts, and gives another order.
    let wide = PlanOptions { working_set_bytes_max: 4 << 30, ..PlanOptions::default() };
    let wide = Plan::new(data, &wide).unwrap();
    assert!(!wide.has_parts() && wide.id() != plan.id());
    assert!(!serde_json::to_string(&wide).unwrap().contains("part_bytes"));
}

#[test]
fn row_groups_in_too_many_parts_are_refused() {
    let options = PlanOptions { working_set_bytes_max: 1, ..options(1, 60, 6, 64) };
    let refused = Plan::new(dataset(&[&[1 << 30]]), &options).unwrap_err();
    assert!(refused.to_string().contains("working_set_bytes_max"), "{refused}");
    let stored = Plan::new(dataset(&[&[1000]]), &options).unwrap();
    let mut stored = serde_json::to_value(&stored).unwrap();
    stored["dataset"]["files"][0]["row_groups"][0] =
        serde_json::json!({ "rows": 1 << 30, "bytes": 1_u64 << 40 });
    let refused = serde_json::from_value::<Plan>(stored).unwrap_err();
    assert!(refused.to_string().contains("parts"), "{refused}");
}

#[test]
fn epochs_are_counted_exactly() {
    let plan = Plan::new(dataset(&[&[10, 15], &[12]]), &options(3, 8, 4, 5)).unwrap();
    assert_eq!(plan.rows(), 37);
    assert_eq!(plan.steps_for_epochs(0), 0);
    assert_eq!(plan.steps_for_epochs(1), 5);
    assert_eq!(plan.steps_for_epochs(8), 37);
    for epochs in 1..20 {
        let steps = plan.steps_for_epochs(epochs);
        assert!(plan.epochs_after(steps) >= epochs && plan.epochs_after(steps - 1) < epochs);
    }
    let mut counts = [0u64; 3];
    for step in 0..plan.steps_for_epochs(3) {
        for slot in 0..8 {
            if let Some(n) = counts.get_mut(plan.row_at(step, slot).unwrap().1 as usize) {
                *n += 1;
            }
        }
    }
    assert_eq!(counts, [37; 3]);
    assert_eq!(plan.rows_of_epoch(1, 4..6), 11);
    assert_eq!((0..30).map(|s| plan.rows_of_epoch(1, s..s + 1)).sum::<u64>(), 37);
}

#[test]
fn row_and_slot_are_inverse_and_addresses_agree() {
    let plan = Plan::new(dataset(&[&[10, 0, 15], &[12]]), &options(3, 8, 4, 5)).unwrap();
    for step in 0..50 {
        for slot in 0..8 {
            let (row, epoch) = plan.row_at(step, slot).unwrap();
            assert_eq!(plan.slot_of(epoch, row).unwrap(), (step, slot));
        }
    }
    let address = |row| plan.address_of(row).map(|a| (a.file, a.row_group, a.row));
    let part = |i| format!("train/part-{i}.parquet");
    assert_eq!(address(0), Some((part(0), 0, 0)));
    assert_eq!(address(10), Some((part(0), 2, 0)));
    assert_eq!(address(36), Some((part(1), 0, 11)));
    assert_eq!(address(37), None);
}

#[test]
fn stored_plans_are_checked() {
    let plan = Plan::new(dataset(&[&[10, 15], &[12]]), &options(3, 8, 4, 5)).unwrap();
    let text = serde_json::to_string(&plan).unwrap();
    let back: Plan = serde_json::from_str(&text).unwrap();
    assert_eq!(back.id(), plan.id());
    assert_eq!(back.dataset(), plan.dataset());
    assert_eq!(back.row_at(9, 3).unwrap(), plan.row_at(9, 3).unwrap());
    for (from, to, says) in [
        ("\"seed\":3", "\"seed\":4", "hashes to"),
        ("\"rows\":15", "\"rows\":16", "hashes to"),
        ("\"lanes\":4", "\"lanes\":3", "do not divide"),
        ("\"lanes\":4", "\"lanes\":0", "lanes is 0"),
        ("\"rows\":15", "\"rows\":99999999999", "row group is too large"),
        ("\"algorithm_version\":1", "\"algorithm_version\":9", "version 9"),
        ("\"seed\":3", "\"seed\":3,\"extra\":1", "unknown field"),
    ] {
        assert!(text.contains(from), "{from} in {text}");
        let error = serde_json::from_str::<Plan>(&text.replace(from, to)).unwrap_err().to_string();
        assert!(error.contains(says), "{from} -> {to}: {error}");
    }
}

#[test]
fn bounds_are_enforced_with_the_name_of_the_option() {
    let fails = |o: PlanOptions| Plan::new(dataset(&[&[10]]), &o).unwrap_err().to_string();
    assert!(fails(options(0, 0, 1, 1)).contains("batch_rows is 0"));
    assert!(fails(options(0, 1, 0, 1)).contains("lanes is 0"));
    assert!(fails(options(0, 1, 1, 0)).contains("window_rows is 0"));
    assert!(fails(options(0, BATCH_ROWS_MAX + 1, 1, 1)).contains("batch_rows is"));
    let plan = Plan::new(dataset(&[&[10]]), &options(0, 4, 1, 10)).unwrap();
    assert!(plan.row_at(0, 4).is_err());
    assert!(plan.row_at(u64::MAX, 0).is_err());
    assert!(plan.slot_of(0, 10).is_err());
    assert!(plan.slot_of(u64::MAX, 0).is_err());
    let other = Plan::new(dataset(&[&[10]]), &options(1, 4, 1, 10)).unwrap();
    let error = plan.step_of(&other.cursor(3)).unwrap_err();
    assert!(matches!(error, FeedError::OtherPlan { .. }), "{error}");
    assert_eq!(plan.step_of(&plan.cursor(3)).unwrap(), 3);
}

#[test]
fn cursors_round_trip_as_json_and_refuse_other_plans() {
    let plan = Plan::new(dataset(&[&[10]]), &options(0, 4, 1, 10)).unwrap();
    let text = serde_json::to_string(&plan.cursor(12)).unwrap();
    assert_eq!(text, format!("{{\"plan_id\":\"{}\",\"step\":12}}", plan.id()));
    assert_eq!(serde_json::from_str::<Cursor>(&text).unwrap(), plan.cursor(12));
    assert!(serde_json::from_str::<Cursor>("{\"plan_id\":\"00\",\"step\":1}").is_err());
}

#[test]
fn shards_cover_a_batch_without_overlap() {
    for world in 1..20u32 {
        for batch in [1usize, 7, 64, 97] {
            let mut next = 0;
            for rank in 0..world {
                let slots = Shard::new(rank, world).unwrap().slots(batch);
                assert_eq!(slots.start, next);
                next = slots.end;
                assert!(slots.len().abs_diff(batch / world as usize) <= 1);
            }
            assert_eq!(next, batch);
        }
    }
    assert!(Shard::new(2, 2).is_err());
    assert!(serde_json::from_str::<Shard>("{\"rank\":3,\"world\":3}").is_err());
}

#[test]
fn coverage_names_missing_repeated_and_foreign_rows() {
    let plan = Arc::new(Plan::new(dataset(&[&[70], &[30]]), &PlanOptions::default()).unwrap());
    let all: Vec<u64> = (0..100).rev().collect();
    let report = |rows: &[&[u64]]| {
        let mut coverage = Coverage::new(Arc::clone(&plan)).unwrap();
        rows.iter().for_each(|rows| coverage.add(rows));
        coverage.report()
    };
    let whole = report(&[&all]);
    assert!(whole.is_exact() && whole.rows == 100, "{whole:?}");
    assert_eq!(whole.digest, report(&[&all[..30], &all[30..]]).digest);
    assert_ne!(whole.digest, report(&[&all[30..], &all[..30]]).digest);
    let found = report(&[&all[..50], &all[49..99]]);
    assert!(!found.is_exact());
    assert_eq!((found.missing.first, found.repeated.first), (vec![0], vec![50]));
    let found = report(&[&[5, 5, 1000]]);
    assert_eq!((found.missing.count, found.missing.first.len(), found.repeated.count), (99, 10, 2));
    assert_eq!(found.foreign.count, 0);
}

#[test]
fn large_row_groups_are_read_in_parts_whatever_is_selected() {
    use base64::Engine;
    // Every eighth row: together they are within the bound, and their row group is not.
    let bits = zstd::encode_all(&[1u8; 1_000_000 / 8][..], 0).unwrap();
    let bits = base64::engine::general_purpose::STANDARD.encode(bits);
    let rows = RowSet::decode(&bits, 1_000_000).unwrap();
    let selection = Selection::new(Some("x != 0"), &[], None, &[]).unwrap();
    let options = PlanOptions { working_set_bytes_max: 20 << 20, selection, ..PlanOptions::default() };
    let plan = Plan::with_rows(dataset(&[&[1_000_000]]), &options, Some(rows)).unwrap();
    assert_eq!(plan.rows(), 125_000);
    assert!(plan.has_parts());
}

#[test]
fn images_of_uneven_size_keep_the_memory_bound() {
    // A hundred thousand images of about 100 kB, and one of 200 MB: the bound is that of the typical one.
    let file = |i: u64| {
        let bytes = if i == 500 { 200_000_000 } else { 50_000 + (i * 37) % 100_000 };
        let row_groups = vec![RowGroup { rows: 1, bytes }];
        DataFile {
            path: format!("t/{}/{i:06}.jpg", i % 10),
            bytes,
            format: FileFormat::Folder,
            row_groups,
            cuts: Vec::new(),
        }
    };
    let schema = Arc::new(Schema::new(vec![Field::new("data", DataType::Binary, false)]));
    let data = Dataset::new("/t".into(), schema, Vec::new(), (0..100_000).map(file).collect()).unwrap();
    let plan = Plan::new(data, &PlanOptions::default()).unwrap();
    assert!(plan.working_set_bytes() <= 1 << 30, "{} bytes", plan.working_set_bytes());
    assert!(plan.window_rows() >= 2_000, "{} rows", plan.window_rows());
}
