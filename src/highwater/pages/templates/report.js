/* A report's picture: one question, whose figures stand in the page. */
page.show(JSON.parse(page.at("frontier-data").textContent));
