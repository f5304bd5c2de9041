//! Test models: a small linear layer, and a model that sets every field of the schema.

use crate::onnx::*;

/// `logits = input · weight + bias` with a symbolic batch.
pub(crate) fn linear(inputs: i64, outputs: i64) -> ModelProto {
    let tensor = |name: &str, dims: Vec<i64>| TensorProto {
        name: Some(name.into()),
        data_type: Some(tensor_proto::DataType::Float as i32),
        float_data: vec![0.5; dims.iter().product::<i64>() as usize],
        dims,
        ..Default::default()
    };
    let mut graph = GraphProto {
        name: Some("linear".into()),
        node: vec![NodeProto {
            op_type: Some("Gemm".into()),
            input: ["input", "weight", "bias"].map(String::from).to_vec(),
            output: vec!["logits".into()],
            ..Default::default()
        }],
        initializer: vec![tensor("weight", vec![inputs, outputs]), tensor("bias", vec![outputs])],
        input: vec![value("input", inputs)],
        output: vec![value("logits", outputs)],
        ..Default::default()
    };
    // Old exporters list initializers among the inputs as well.
    graph.input.push(value("weight", outputs));
    ModelProto {
        ir_version: Some(8),
        opset_import: vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(17) }],
        graph: Some(graph),
        ..Default::default()
    }
}

fn value(name: &str, extent: i64) -> ValueInfoProto {
    use tensor_shape_proto::{Dimension, dimension::Value};
    let dim = |value| Dimension { value: Some(value), ..Default::default() };
    let shape =
        TensorShapeProto { dim: vec![dim(Value::DimParam("batch".into())), dim(Value::DimValue(extent))] };
    let tensor = type_proto::Tensor { elem_type: Some(1), shape: Some(shape) };
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..Default::default() }),
        ..Default::default()
    }
}

/// Zero and empty values that are present, every kind of attribute and type, functions, training and device
/// information.
pub(super) fn every_message() -> ModelProto {
    let text = |text: &str| Some(text.to_string());
    let pair = || StringStringEntryProto { key: text("k"), value: text("") };
    let types = vec![
        type_proto::Value::SequenceType(Box::new(type_proto::Sequence { elem_type: Some(Box::default()) })),
        type_proto::Value::MapType(Box::new(type_proto::Map {
            key_type: Some(0),
            value_type: Some(Box::default()),
        })),
        type_proto::Value::OptionalType(Box::new(type_proto::Optional { elem_type: Some(Box::default()) })),
        type_proto::Value::SparseTensorType(type_proto::SparseTensor::default()),
        type_proto::Value::OpaqueType(type_proto::Opaque { domain: text("d"), name: text("") }),
    ];
    let types: Vec<TypeProto> =
        types.into_iter().map(|value| TypeProto { value: Some(value), denotation: text("") }).collect();
    let mut model = linear(1, 1);
    let tensor = TensorProto {
        dims: vec![0],
        data_type: Some(0),
        segment: Some(tensor_proto::Segment { begin: Some(0), end: Some(0) }),
        int32_data: vec![-1, 0],
        string_data: vec![vec![], vec![255]],
        int64_data: vec![i64::MIN],
        raw_data: Some(vec![]),
        external_data: vec![pair()],
        data_location: Some(0),
        double_data: vec![-0.0],
        uint64_data: vec![u64::MAX],
        metadata_props: vec![pair()],
        ..Default::default()
    };
    let sparse =
        SparseTensorProto { values: Some(tensor.clone()), indices: Some(tensor.clone()), dims: vec![0, 1] };
    let attribute = AttributeProto {
        name: text("a"),
        ref_attr_name: text(""),
        doc_string: text(""),
        r#type: Some(attribute_proto::AttributeType::TypeProtos as i32),
        f: Some(0.0),
        i: Some(0),
        s: Some(vec![]),
        t: Some(tensor.clone()),
        g: model.graph.clone(),
        sparse_tensor: Some(sparse.clone()),
        tp: types.first().cloned(),
        floats: vec![0.0, -1.5],
        ints: vec![0, -1],
        strings: vec![vec![0]],
        tensors: vec![tensor],
        graphs: vec![GraphProto::default()],
        sparse_tensors: vec![sparse.clone()],
        type_protos: types,
    };
    if let Some(graph) = &mut model.graph {
        let node = &mut graph.node[0];
        node.attribute = vec![attribute.clone()];
        node.overload = text("");
        node.metadata_props = vec![pair()];
        node.device_configurations = vec![NodeDeviceConfigurationProto {
            configuration_id: text("c"),
            sharding_spec: vec![ShardingSpecProto {
                tensor_name: text("weight"),
                device: vec![0],
                index_to_device_group_map: vec![IntIntListEntryProto { key: Some(0), value: vec![0] }],
                sharded_dim: vec![ShardedDimProto {
                    axis: Some(0),
                    simple_sharding: vec![SimpleShardedDimProto {
                        dim: Some(simple_sharded_dim_proto::Dim::DimParam("n".into())),
                        num_shards: Some(0),
                    }],
                }],
            }],
            pipeline_stage: Some(0),
        }];
        graph.sparse_initializer = vec![sparse];
        graph.quantization_annotation = vec![TensorAnnotation {
            tensor_name: text("weight"),
            quant_parameter_tensor_names: vec![pair()],
        }];
        graph.value_info = graph.output.clone();
        graph.metadata_props = vec![pair()];
    }
    model.functions = vec![FunctionProto {
        name: text("f"),
        attribute: vec!["x".into()],
        attribute_proto: vec![attribute],
        overload: text("o"),
        metadata_props: vec![pair()],
        ..Default::default()
    }];
    model.training_info = vec![TrainingInfoProto {
        initialization: model.graph.clone(),
        update_binding: vec![pair()],
        ..Default::default()
    }];
    model.configuration =
        vec![DeviceConfigurationProto { name: text("c"), num_devices: Some(0), device: vec!["cpu".into()] }];
    model.metadata_props = vec![pair()];
    model.model_version = Some(0);
    model
}
