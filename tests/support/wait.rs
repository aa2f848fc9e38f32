//! Waiting, with a deadline and the object as it was when the deadline came.

use std::{fmt::Debug, time::Duration};

use kube::{
    Api, Resource, ResourceExt,
    runtime::wait::{await_condition, conditions},
};
use serde::{Serialize, de::DeserializeOwned};
use tokio::time::{sleep, timeout};

/// Far above what anything here takes; a machine that is busy must not fail a test.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// The object, once `holds` is true of it.
pub async fn until<K>(api: &Api<K>, name: &str, promise: &str, holds: impl Fn(&K) -> bool) -> K
where
    K: Resource + Clone + Debug + DeserializeOwned + Serialize + Send + 'static,
{
    let wanted = async {
        loop {
            let condition = |object: Option<&K>| object.is_some_and(&holds);
            // An interrupted watch is begun anew.
            if let Ok(Some(object)) = await_condition(api.clone(), name, condition).await {
                return object;
            }
        }
    };
    if let Ok(object) = timeout(PATIENCE, wanted).await {
        return object;
    }
    panic!("not within {PATIENCE:?}: {promise}; {name} is {}", shown(api, name).await)
}

/// Until there is no object of this name, or another one has it.
pub async fn until_gone<K>(api: &Api<K>, object: &K, promise: &str)
where
    K: Resource + Clone + Debug + DeserializeOwned + Serialize + Send + 'static,
{
    let (name, uid) = (object.name_any(), object.uid().unwrap_or_default());
    let gone = async { while await_condition(api.clone(), &name, conditions::is_deleted(&uid)).await.is_err() {} };
    if timeout(PATIENCE, gone).await.is_ok() {
        return;
    }
    panic!("not within {PATIENCE:?}: {promise}; {name} is {}", shown(api, &name).await)
}

/// For what cannot be watched: asks again and again.
pub async fn eventually<T>(promise: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let answer = async {
        loop {
            match ask().await {
                Some(answer) => return answer,
                None => sleep(Duration::from_millis(50)).await,
            }
        }
    };
    timeout(PATIENCE, answer).await.unwrap_or_else(|_elapsed| panic!("not within {PATIENCE:?}: {promise}"))
}

async fn shown<K>(api: &Api<K>, name: &str) -> String
where
    K: Resource + Clone + Debug + DeserializeOwned + Serialize,
{
    match api.get_opt(name).await {
        Ok(Some(mut object)) => {
            object.managed_fields_mut().clear();
            serde_json::to_string_pretty(&object).unwrap_or_else(|error| error.to_string())
        }
        Ok(None) => "not there".to_owned(),
        Err(error) => format!("not readable: {error}"),
    }
}
