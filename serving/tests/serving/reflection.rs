//! Tests of reflection: clients discover the services without their `.proto` files.

use crate::support::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reflection_describes_the_services() {
    let server = Server::start(config(), &[]).await;
    let url = format!("http://{}", server.serving.addresses().grpc);
    let channel = tonic::transport::Endpoint::from_shared(url).unwrap().connect().await.unwrap();
    macro_rules! describe {
        ($version:ident) => {{
            use tonic_reflection::pb::$version::server_reflection_client::ServerReflectionClient;
            use tonic_reflection::pb::$version::server_reflection_request::MessageRequest;
            use tonic_reflection::pb::$version::server_reflection_response::MessageResponse;
            let mut client = ServerReflectionClient::new(channel.clone());
            let ask = |message: MessageRequest| tonic_reflection::pb::$version::ServerReflectionRequest {
                host: String::new(),
                message_request: Some(message),
            };
            let symbol = |name: &str| ask(MessageRequest::FileContainingSymbol(name.to_owned()));
            let asked = [
                ask(MessageRequest::ListServices(String::new())),
                symbol("inference.GRPCInferenceService.ModelStatistics"),
                symbol("grpc.health.v1.Health"),
                symbol("inference.NoSuchMessage"),
            ];
            let count = asked.len();
            let mut answers =
                client.server_reflection_info(futures::stream::iter(asked)).await.unwrap().into_inner();
            let mut told = Vec::new();
            while told.len() < count {
                match answers.message().await {
                    Ok(Some(answer)) => told.push(match answer.message_response.unwrap() {
                        MessageResponse::ListServicesResponse(list) => {
                            list.service.into_iter().map(|service| service.name).collect::<Vec<_>>().join(" ")
                        }
                        MessageResponse::FileDescriptorResponse(files) => files
                            .file_descriptor_proto
                            .iter()
                            .map(|file| String::from_utf8_lossy(file).into_owned())
                            .collect(),
                        other => format!("{other:?}"),
                    }),
                    Ok(None) => break,
                    Err(status) => told.push(format!("{:?}", status.code())),
                }
            }
            told
        }};
    }
    for told in [describe!(v1), describe!(v1alpha)] {
        assert!(told[0].contains("inference.GRPCInferenceService"), "{}", told[0]);
        assert!(told[0].contains("grpc.health.v1.Health"), "{}", told[0]);
        assert!(told[1].contains("ModelStatisticsResponse"), "{}", told[1]);
        assert!(told[2].contains("HealthCheckRequest"), "{}", told[2]);
        assert!(!told[3].contains("proto3"), "{}", told[3]);
    }
    server.stop().await;
}
